"""What workers in processes of their own cost per step, and what crosses (`make bench`).

An empty step (nothing scheduled) is nothing but the executor: encode, two messages, decode. The decode steps of gpt2-tiny run
alternately with the worker in this process and in its own; so what else the machine does concerns both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.distributed.multiproc_executor import MultiprocExecutor
from stage03_engine.core.features.distributed.worker_messages import encode
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

WINDOWS, STEPS = 40, 10


@contextmanager
def core(backend: str) -> Iterator[EngineCore]:
    settings = {"distributed_executor_backend": backend, "num_gpu_blocks_override": 2_000, "num_threads": 1}
    core = EngineCore(EngineArgs.from_kwargs(model="gpt2-tiny", **settings))
    try:
        yield core
    finally:
        core.shutdown()


def add_requests(core: EngineCore, count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=(WINDOWS + 2) * STEPS, ignore_eos=True)
    for number in range(count):
        core.add_request(EngineCoreRequest(f"cmpl-{number:032x}-0", [number + 1] * 16, params))
    core.step()


def seconds_of(core: EngineCore) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    return (time.perf_counter() - started) / STEPS


def test_an_empty_step(benchmark: BenchmarkFixture) -> None:
    """There and back, without a model."""
    nothing = SchedulerOutput(1, [], {}, {}, [], [])
    with core("mp") as engine:
        assert isinstance(engine.executor, MultiprocExecutor)
        benchmark.pedantic(lambda: engine.executor.execute_model(nothing), rounds=2000, warmup_rounds=100)


@pytest.mark.parametrize("count", [1, 32])
def test_a_decode_step(benchmark: BenchmarkFixture, count: int) -> None:
    """gpt2-tiny, greedy: a step with the worker in its own process, beside one in this process; bytes and messages."""
    with ExitStack() as stack:
        engines = {backend: stack.enter_context(core(backend)) for backend in ("uni", "mp")}
        for engine in engines.values():
            add_requests(engine, count)
        times: dict[str, list[float]] = {backend: [] for backend in engines}
        for _ in range(WINDOWS):
            for backend, engine in engines.items():
                times[backend].append(seconds_of(engine))
        sizes = bytes_of_a_step(engines["mp"])
        benchmark.pedantic(engines["mp"].step, rounds=STEPS)
    uni, mp = (statistics.median(times[backend]) for backend in ("uni", "mp"))
    benchmark.extra_info["milliseconds_in_this_process"] = round(1e3 * uni, 3)
    benchmark.extra_info["milliseconds_in_its_own_process"] = round(1e3 * mp, 3)
    benchmark.extra_info["microseconds_more"] = round(1e6 * (mp - uni), 1)
    least = {backend: min(seconds) for backend, seconds in times.items()}
    benchmark.extra_info["microseconds_more_in_the_quickest_windows"] = round(1e6 * (least["mp"] - least["uni"]), 1)
    benchmark.extra_info["messages_and_bytes"] = f"1 of {sizes[0]} to each worker, 1 of {sizes[1]} back"


def bytes_of_a_step(engine: EngineCore) -> tuple[int, int]:
    """Of the decision, and of the answer."""
    executor: Any = engine.executor
    seen: list[int] = []
    begin, finish = executor.begin_step, executor.finish_step

    def begin_step(output: SchedulerOutput) -> None:
        seen.append(len(encode(output)))
        begin(output)

    def finish_step() -> Any:
        ran = finish()
        seen.append(len(encode(ran)))
        return ran

    executor.begin_step, executor.finish_step = begin_step, finish_step
    engine.step()
    executor.begin_step, executor.finish_step = begin, finish
    return seen[0], seen[1]
