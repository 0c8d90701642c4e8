"""What prompt lookup brings where the text repeats, and what it costs where it does not, as ratios within one run."""

from __future__ import annotations

import statistics
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

TOKENS = 96
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
CASES = {
    "repetitive": ("We are resolved. " * 12, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)),
    "not repetitive": ("ROMEO:", SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_per_second_with_drafts(benchmark: BenchmarkFixture, case: str) -> None:
    """The same engine settings and the same tokens, turn and turn about."""
    prompt, params = CASES[case]
    common = {"kv_cache_memory_bytes": 50_000_000}
    with LLM("gpt2-tiny", **common) as plain, LLM("gpt2-tiny", **common, speculative_config=NGRAM) as drafting:
        times: dict[LLM, list[float]] = {plain: [], drafting: []}
        for round_ in range(6):
            for llm in times:
                started = time.perf_counter()
                llm.generate(prompt, params)
                if round_:  # the first one warms up
                    times[llm].append(time.perf_counter() - started)
        benchmark.pedantic(lambda: drafting.generate(prompt, params), rounds=3)
        stats = drafting.engine_core._core.scheduler.stats.counts
        without, with_drafts = (statistics.median(seconds) for seconds in times.values())
        benchmark.extra_info["tokens_per_second_without"] = round(TOKENS / without)
        benchmark.extra_info["tokens_per_second_with"] = round(TOKENS / with_drafts)
        benchmark.extra_info["ratio"] = round(without / with_drafts, 2)
        benchmark.extra_info["accepted_share"] = round(
            stats.get("spec_decode_num_accepted_tokens", 0) / max(1, stats.get("spec_decode_num_draft_tokens", 0)), 2
        )
