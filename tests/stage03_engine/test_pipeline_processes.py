"""Pipeline stages in processes of their own: the same tokens, and stages that work at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_tensor_parallel import prompts

from stage03_engine.llm import LLM
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.check.invariants import check
from stagetrace.read.story import tell

SMALL: dict[str, Any] = {
    "model": "gpt2-tiny", "max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 70, "max_num_batched_tokens": 48,
    "max_num_seqs": 16,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def answers(llm: LLM) -> list[list[int]]:
    tokens = [output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY)]
    stats = llm.engine_core._core.scheduler.stats  # type: ignore[attr-defined]
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0, "the test is void if nothing was preempted"
    return tokens


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SMALL) as llm:
        return answers(llm)


def test_two_stages_give_the_same_tokens_and_work_at_the_same_time(expected: list[list[int]], tmp_path: Path) -> None:
    with LLM(**SMALL, pipeline_parallel_size=2, trace=str(tmp_path)) as llm:
        assert answers(llm) == expected
    run = read_run(tmp_path)
    began = {e.step: e.ts for e in run.named("model.forward") if e.ph == "B" and "PP0" in e.proc}
    ended = {e.step: e.ts for e in run.named("model.forward") if e.ph == "E" and "PP1" in e.proc}
    assert began.keys() == ended.keys() and len(began) > 20
    assert any(step + 1 in began and began[step + 1] < ended[step] for step in ended), "the stages took turns"
    kinds = {(e.proc[-7:], e.args["kind"]) for e in run.named("worker.collective")}
    assert kinds == {("PP0_TP0", "send"), ("PP1_TP0", "receive")}
    sent = {e.ref for e in run.named("worker.collective") if e.ph == "B" and e.args["kind"] == "send"}
    received = {e.cause for e in run.named("worker.collective") if e.ph == "E" and e.args["kind"] == "receive"}
    assert received == sent
    steps = [step for step in tell(run.events).steps if step.total_tokens]
    assert all(step.decided_ns < step.forward_ns[0] < step.forward_ns[1] < step.end_ns for step in steps)
    assert check(tmp_path).deaths == []
    assert [result.difference for result in replay(tmp_path)] == [None]


@pytest.mark.slow
def test_two_stages_of_two_slices_give_the_same_tokens(expected: list[list[int]]) -> None:
    with LLM(**SMALL, pipeline_parallel_size=2, tensor_parallel_size=2) as llm:
        assert answers(llm) == expected
