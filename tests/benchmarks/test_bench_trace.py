"""What the trace costs, switched off and on (`make bench`). `LLM` in one process: engine and front end without HTTP."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import Recorder, read_run, trace

GPT2 = {"model": "gpt2", "load_format": "dummy", "kv_cache_memory_bytes": 600_000_000, "dtype": "float32"}
TINY = {"model": "gpt2-tiny", "kv_cache_memory_bytes": 200_000_000}
ROOM = {"num_threads": 1}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class CountingRecorder(Recorder):
    """A recorder that is off and counts how often it was asked."""

    asked = 0

    @property
    def on(self) -> bool:  # type: ignore[override]
        CountingRecorder.asked += 1
        return False

    @on.setter
    def on(self, value: bool) -> None:
        pass


def guards_per_step(llm: LLM, requests: int) -> float:
    """Guards that one more decode step runs through, in the engine and in the front end."""
    asked = []
    trace.__class__ = CountingRecorder
    try:
        for tokens in (4, 20):
            CountingRecorder.asked = 0
            llm.generate([[7] * 4] * requests, greedy(tokens))
            asked.append(CountingRecorder.asked)
    finally:
        trace.__class__ = Recorder
    return (asked[1] - asked[0]) / 16


def nanoseconds_per_guard() -> float:
    def loop(guarded: bool) -> float:
        started = time.perf_counter_ns()
        if guarded:
            for _ in range(100_000):
                if trace.on:
                    raise AssertionError
        else:
            for _ in range(100_000):
                pass
        return time.perf_counter_ns() - started

    return max(0.1, statistics.median(loop(True) - loop(False) for _ in range(9)) / 100_000)


@pytest.mark.parametrize("requests", [1, 32])
def test_switched_off(benchmark: BenchmarkFixture, requests: int) -> None:
    """Guards per step x cost of a guard, against a decode step of gpt2's shape: below 0.1 %."""
    with LLM(**GPT2, **ROOM) as llm:
        guards = guards_per_step(llm, requests)
        started = time.perf_counter_ns()
        llm.generate([[7] * 4] * requests, greedy(16))
        step = (time.perf_counter_ns() - started) / 16
        benchmark.pedantic(lambda: llm.generate([[7] * 4], greedy(2)), rounds=1)
    cost = nanoseconds_per_guard()
    benchmark.extra_info["guards_per_step"] = guards
    benchmark.extra_info["nanoseconds_per_guard"] = round(cost, 1)
    benchmark.extra_info["milliseconds_per_step"] = round(step / 1e6, 1)
    benchmark.extra_info["percent_of_a_step"] = round(100 * guards * cost / step, 5)
    assert guards > 10 and guards * cost < 0.001 * step


@pytest.mark.parametrize(("model", "pairs"), [(TINY, 240), (GPT2, 24)], ids=["gpt2-tiny", "gpt2"])
def test_switched_on(benchmark: BenchmarkFixture, tmp_path: Path, model: dict[str, Any], pairs: int) -> None:
    """32 running requests, a traced step after each untraced one: at most 3 % of the throughput.

    CPU time of the process, with the write to the file charged to each traced step: neighbours on the machine show in
    it as little as possible, and the median of the differences between adjacent steps is what is left.
    """
    times: dict[bool, list[int]] = {False: [], True: []}
    with LLM(**model, **ROOM) as llm:
        params = greedy(2 * pairs + 20)
        for i in range(32):
            request = llm.input_processor.process_inputs(f"cmpl-{i:032x}-0", [7 + i] * 4, params)
            for child in llm.output_processor.add_request(request):
                llm.engine_core.add_request(child)
        trace.open(str(tmp_path))
        for step in range(2 * pairs + 4):
            trace.on = step % 2 == 1
            started = time.process_time_ns()
            llm.step()
            trace.flush()
            if step >= 4:
                times[trace.on].append(time.process_time_ns() - started)
        trace.close()
        benchmark.pedantic(llm.step, rounds=5)
    run = read_run(tmp_path)
    events = len(run.events) / (len(run.named("engine.step")) // 2)
    step_time = statistics.median(times[False])
    cost = statistics.median(on - off for off, on in zip(times[False], times[True], strict=True))
    benchmark.extra_info["events_per_step"] = round(events)
    benchmark.extra_info["milliseconds_per_step"] = round(step_time / 1e6, 2)
    benchmark.extra_info["microseconds_per_event"] = round(cost / events / 1e3, 2)
    benchmark.extra_info["percent_of_throughput"] = round(100 * cost / step_time, 2)
    assert cost < 0.03 * step_time
