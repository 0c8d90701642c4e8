"""Offloaded blocks with several workers: each keeps its part, what is found changes no token, and a slow worker's copies are not late."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from test_kv_transfer import SMALL, assert_all_free, assert_recorded, core_of, model, tokens_of
from test_tensor_parallel import GPT2, LLAMA, TOKENIZER, checkpoint

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.distributed.rank_config import rank_config
from stage03_engine.core.features.distributed.several_workers import all_ranks
from stage03_engine.core.features.kv_transfer.offloading import num_cpu_blocks
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset_prefix_cache
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

__all__ = ["model"]  # fixture
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ROUNDS = [
    [[*range(5, 45)], [*range(5, 38), 60], [9] * 30],
    [[70 + n] * 40 for n in range(4)],  # drives the others out of the cache
    [[*range(5, 45), 8], [*range(5, 38), 61], [9] * 31],
    [[*range(5, 45), 8, 7], [70] * 41, [71] * 41],
]
FEW = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": None}
WORKERS: dict[str, dict[str, Any]] = {
    "two slices": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "two slices, ahead": {"tensor_parallel_size": 2, "async_scheduling": True},
    "two slices, 8 bits": {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"},
}


def answers(llm: LLM) -> list[list[list[int]]]:
    """Round by round; after each, all blocks are free. The second time all is found in memory."""
    found = []
    for prompts in (*ROUNDS, *ROUNDS):
        found.append(tokens_of(llm.generate(prompts, GREEDY)))
        assert_all_free(core_of(llm))
        for hook in core_of(llm).scheduler.hooks:
            hook.check_invariants()
        assert reset_prefix_cache(core_of(llm))
    return found


@pytest.mark.slow(keep="two slices-one is slow")
@pytest.mark.parametrize("slow", [False, True], ids=["", "one is slow"])
@pytest.mark.parametrize("name", WORKERS)
def test_the_tokens_are_those_of_one_worker(
    name: str, slow: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a connector."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where the workers find this folder
    how = SMALL | FEW | {"kv_cache_dtype": WORKERS[name].get("kv_cache_dtype", "auto")}
    with LLM(model, **how) as llm:
        expected = answers(llm)
    how |= WORKERS[name] | ({"worker_cls": "slow_last_rank:SlowRank"} if slow else {})
    with LLM(model, trace=str(tmp_path), kv_offloading_size=0.01, **how) as llm:
        assert answers(llm) == expected
        workers = set(core_of(llm).executor.lanes)  # type: ignore[attr-defined]
    assert_recorded(tmp_path)
    loaded = read_run(tmp_path).named("kv_transfer.loaded")
    assert {event.proc for event in loaded} == workers
    steps = {event.step: event.args["blocks"] for event in loaded}
    assert sum(map(len, steps.values())) > 40
    assert all(event.args["blocks"] == steps[event.step] for event in loaded)  # the same blocks everywhere
    assert len(loaded) == len(workers) * len(steps)


@pytest.mark.parametrize("config", [GPT2, LLAMA, LLAMA | {"num_key_value_heads": 1}])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3)])
def test_scheduler_and_workers_count_the_same_places_within_the_size(
    config: dict[str, Any], tp: int, pp: int, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", config)
    engine = EngineArgs.from_kwargs(
        model=model, tokenizer=TOKENIZER, device="cpu", tensor_parallel_size=tp, pipeline_parallel_size=pp,
        kv_offloading_size=0.001,
    )  # fmt: skip
    every = [rank_config(engine, rank) for rank in all_ranks(engine)] if tp * pp > 1 else [engine]
    [count] = {num_cpu_blocks(each) for each in (engine, *every)}
    taken = count * sum(kv_block_bytes(each) for each in every)
    one_more = (count + 1) * sum(kv_block_bytes(each) for each in every)
    assert taken <= 0.001 * (1 << 30) < one_more
