"""What it costs that no bit depends on the batch, as a ratio within one run."""

from __future__ import annotations

import statistics
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize("num_requests", [1, 32])
def test_batch_invariance(benchmark: BenchmarkFixture, num_requests: int) -> None:
    """The same requests, turn and turn about."""
    prompts, common = ["ROMEO: hello"] * num_requests, {"kv_cache_memory_bytes": 100_000_000, "num_threads": 1}
    with LLM("gpt2-tiny", **common) as plain, LLM("gpt2-tiny", **common, batch_invariant=True) as invariant:
        times: dict[LLM, list[float]] = {plain: [], invariant: []}
        for round_ in range(6):
            for llm in times:
                started = time.perf_counter()
                llm.generate(prompts, GREEDY)
                if round_:  # the first one warms up
                    times[llm].append(time.perf_counter() - started)
        benchmark.pedantic(lambda: invariant.generate(prompts, GREEDY), rounds=2)
    without, with_ = (statistics.median(seconds) for seconds in times.values())
    benchmark.extra_info["tokens_per_second_plain"] = round(num_requests * TOKENS / without)
    benchmark.extra_info["tokens_per_second_invariant"] = round(num_requests * TOKENS / with_)
    benchmark.extra_info["cost_ratio"] = round(with_ / without, 2)
