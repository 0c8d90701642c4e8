"""Everything at once: requests of every kind in one small engine with every optimisation, against each alone in a plain one."""

from __future__ import annotations

from typing import Any

import pytest

from stage03_engine.llm import LLM
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

SEEDED = {"temperature": 0.9, "seed": 7, "max_tokens": 30}
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    "seeded": SamplingParams(**SEEDED, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(**SEEDED, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "forbidden": SamplingParams(**SEEDED, bad_words=["the", "lord"], logit_bias={5: -50.0}, min_tokens=20),
    "logprobs": SamplingParams(**SEEDED, logprobs=3),
    "prompt logprobs": SamplingParams(**SEEDED, prompt_logprobs=1),
    "three answers": SamplingParams(**SEEDED, n=3, output_kind=RequestOutputKind.FINAL_ONLY),
    "best of four": SamplingParams(**SEEDED, n=2, best_of=4, output_kind=RequestOutputKind.FINAL_ONLY),
    "stop string": SamplingParams(temperature=0, max_tokens=40, stop=["my lord"]),
    "regex": SamplingParams(**SEEDED, structured_outputs=StructuredOutputsParams(regex="(yes|no){3,6}!")),
    "choice": SamplingParams(**SEEDED, structured_outputs=StructuredOutputsParams(choice=["alpha", "beta"])),
}
PROMPTS = {kind: "KING RICHARD:\nMy lord, my lord, my lord, " + kind for kind in KINDS}
PLAIN: dict[str, Any] = {"num_gpu_blocks_override": 200, "enable_prefix_caching": False, "max_num_seqs": 4}
BUSY: dict[str, Any] = {
    "max_model_len": 96, "num_gpu_blocks_override": 34, "block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 12,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}  # fmt: skip


Story = tuple[list[tuple[Any, ...]], list[float]]


def story(output: RequestOutput) -> Story:
    """(all that must be the same, the log-probabilities)."""
    entries = [e for answer in output.outputs for e in answer.logprobs or []] + [
        e for e in output.prompt_logprobs or [] if e
    ]
    ranks = [(e.token_ids, e.sampled_rank) for e in entries]
    answers = [(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in output.outputs]
    return [*answers, *ranks], [x for e in entries for x in e.logprobs]


@pytest.fixture(scope="module")
def alone() -> dict[str, Story]:
    with LLM("gpt2-tiny", max_model_len=96, **PLAIN) as llm:
        return {kind: story(llm.generate(PROMPTS[kind], params)[0]) for kind, params in KINDS.items()}


@pytest.mark.slow(keep="in-process")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("multiprocess", [False, True], ids=["in-process", "multiprocess"])
def test_company_changes_nothing(mode: str, multiprocess: bool, alone: dict[str, Story]) -> None:
    with LLM("gpt2-tiny", preemption_mode=mode, swap_space=0.01, multiprocess=multiprocess, **BUSY) as llm:
        for _ in range(2):  # the second time over a warm prefix cache
            outputs = llm.generate([PROMPTS[kind] for kind in KINDS], list(KINDS.values()))
            for kind, output in zip(KINDS, outputs):
                exact, logprobs = story(output)
                assert exact == alone[kind][0], kind
                assert logprobs == pytest.approx(alone[kind][1], abs=1e-4), kind
        if not multiprocess:
            stats = llm.engine_core._core.scheduler.make_stats()
            assert (
                stats.num_preemptions
                and stats.prefix_cache_hits
                and stats.counts.get("spec_decode_num_accepted_tokens", 0)
            )
