"""What prompt lookup brings where the text repeats, and what it costs where it does not; what a second model brings with 1, 8 and 32 streams.
Ratios within one run."""

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


DRAFT = {"model": "gpt2-tiny-draft", "num_speculative_tokens": 4}
OPENINGS = ("ROMEO:", "First Citizen:", "To be, or not", "KING RICHARD:", "What is", "My lord,", "Now is the", "I will")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("streams", [1, 8, 32])
def test_tokens_per_second_with_a_draft_model(benchmark: BenchmarkFixture, streams: int, temperature: float) -> None:
    """The same tokens, turn and turn about; the medians of each."""
    prompts = [OPENINGS[number % len(OPENINGS)] for number in range(streams)]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=TOKENS, ignore_eos=True)
        for number in range(streams)
    ]
    common = {"kv_cache_memory_bytes": 200_000_000}
    with LLM("gpt2-tiny", **common) as plain, LLM("gpt2-tiny", **common, speculative_config=DRAFT) as drafting:
        times: dict[LLM, list[float]] = {plain: [], drafting: []}
        tokens: dict[LLM, list[list[int]]] = {}
        for round_ in range(6):
            for llm in times:
                started = time.perf_counter()
                tokens[llm] = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
                if round_:
                    times[llm].append(time.perf_counter() - started)
        assert tokens[plain] == tokens[drafting]
        benchmark.pedantic(lambda: drafting.generate(prompts, params), rounds=1)
        counts = drafting.engine_core._core.scheduler.stats.counts
        without, with_drafts = (statistics.median(seconds) for seconds in times.values())
        benchmark.extra_info["tokens_per_second_without"] = round(streams * TOKENS / without)
        benchmark.extra_info["tokens_per_second_with"] = round(streams * TOKENS / with_drafts)
        benchmark.extra_info["ratio"] = round(without / with_drafts, 2)
        drafted, accepted = (counts[f"spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
        benchmark.extra_info["accepted_share"] = round(accepted / drafted, 2)
