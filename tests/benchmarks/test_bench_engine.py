"""What the engine's parts cost, as ratios within one run (`make bench`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Median of a few runs after one to warm up."""
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def test_batching_32_requests(benchmark: BenchmarkFixture) -> None:
    """Continuous batching: throughput of 32 requests at once over one at a time."""
    with LLM("gpt2-tiny", kv_cache_memory_bytes=200_000_000) as llm:
        alone = seconds(lambda: llm.generate("ROMEO: hello", GREEDY))
        together = seconds(lambda: llm.generate(["ROMEO: hello"] * 32, GREEDY))
        benchmark.pedantic(lambda: llm.generate(["ROMEO: hello"] * 32, GREEDY), rounds=3)
    benchmark.extra_info["tokens_per_second_alone"] = round(TOKENS / alone)
    benchmark.extra_info["tokens_per_second_32"] = round(32 * TOKENS / together)
    benchmark.extra_info["ratio"] = round(32 * alone / together, 2)


def test_engine_in_its_own_process(benchmark: BenchmarkFixture) -> None:
    """What ZMQ, msgpack and the second process add to one request's token."""
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        inproc = seconds(lambda: llm.generate("ROMEO: hello", GREEDY))
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000, multiprocess=True) as llm:
        multiprocess = seconds(lambda: llm.generate("ROMEO: hello", GREEDY))
        benchmark.pedantic(lambda: llm.generate("ROMEO: hello", GREEDY), rounds=3)
    benchmark.extra_info["microseconds_per_token_inproc"] = round(1e6 * inproc / TOKENS)
    benchmark.extra_info["microseconds_per_token_multiprocess"] = round(1e6 * multiprocess / TOKENS)
    benchmark.extra_info["ratio"] = round(multiprocess / inproc, 2)


def test_trace_guard(benchmark: BenchmarkFixture) -> None:
    """A switched-off trace: the cost of one `if trace.on:`, beside an empty loop."""
    count = 100_000

    def guarded() -> None:
        for _ in range(count):
            if trace.on:
                raise AssertionError

    def empty() -> None:
        for _ in range(count):
            pass

    benchmark.pedantic(guarded, rounds=5)
    cost = (seconds(guarded) - seconds(empty)) / count
    benchmark.extra_info["nanoseconds_per_guard"] = round(1e9 * cost, 1)
