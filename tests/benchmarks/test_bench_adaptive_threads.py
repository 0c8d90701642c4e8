"""Fewer threads on a busy machine: all threads, as many as the engine finds, and one, beside busy loops and without (`make bench`).

The three forms take turns, window by window, so what else the machine does concerns all. What counts is the ratio to the better of the other two: without loops the
engine should be as fast as with all threads, beside them as with one.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.core.features.adaptive_threads.hook import AdaptiveThreadsHook
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.native import library

pytestmark = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
THREADS, ROUNDS = 2, 5
TOKENS = {1: 256, 32: 64}  # for each of so many requests: half a second or more
FORMS = ("all", "adaptive", "one")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def tokens_per_second(llm: LLM, form: str, count: int) -> float:
    """Of `count` requests at once. Each window begins with all threads, so an engine that adapts must find out anew."""
    decides, most = form == "adaptive", 1 if form == "one" else THREADS
    library.limit_threads(most)
    (hook,) = (each for each in runner_hooks(llm) if isinstance(each, AdaptiveThreadsHook))
    hook.policy.__init__(most)  # type: ignore[misc]
    hook._decides = decides
    params = SamplingParams(temperature=0, max_tokens=TOKENS[count], ignore_eos=True)
    started = time.perf_counter()
    llm.generate([[number + 1] * 16 for number in range(count)], params)
    return count * TOKENS[count] / (time.perf_counter() - started)


def runner_hooks(llm: LLM) -> list[Any]:
    return llm.engine_core._core.executor.worker.model_runner.hooks  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("loops", [0, 4])
@pytest.mark.parametrize("count", [1, 32])
def test_threads_beside_busy_loops(benchmark: BenchmarkFixture, count: int, loops: int) -> None:
    """gpt2-tiny, greedy: medians of windows that take turns."""
    found: dict[str, list[float]] = {form: [] for form in FORMS}

    def measure() -> None:
        with LLM(
            "gpt2-tiny", device="cpu", num_threads=THREADS, adaptive_threads=True, enable_prefix_caching=False
        ) as llm:
            tokens_per_second(llm, "all", count)
            with busy_loops(loops):
                for _ in range(ROUNDS):
                    for form in FORMS:
                        found[form].append(tokens_per_second(llm, form, count))

    benchmark.pedantic(measure, rounds=1)
    speed = {form: statistics.median(each) for form, each in found.items()}
    for form in FORMS:
        benchmark.extra_info[f"{form} threads, tokens/s"] = round(speed[form], 1)
    benchmark.extra_info["adaptive over the better of the others"] = round(
        speed["adaptive"] / max(speed["all"], speed["one"]), 2
    )
