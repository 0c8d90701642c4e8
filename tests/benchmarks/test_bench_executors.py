"""What workers in processes of their own cost per step, and what crosses for a step and a token (`make bench`).

An empty step (nothing scheduled) is nothing but the executor: encode, two messages, decode. The decode steps of gpt2-tiny run
alternately under all forms, so what else the machine does concerns all.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.distributed.multiproc_executor import MultiprocExecutor
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stage03_engine.tracing import open_trace
from stagetrace import read_run, trace

WINDOWS, STEPS = 40, 10
REQUESTS, TOKENS = 8, 32
FORMS: dict[str, dict[str, Any]] = {
    "uni": {},
    "mp1": {"distributed_executor_backend": "mp"},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}
COLUMNS = "form  over uni, us (median, least)  messages/step  bytes/step  messages/token  bytes/token  exchanges/step  bytes/step"


@contextmanager
def core(form: str) -> Iterator[EngineCore]:
    settings = {"num_gpu_blocks_override": 2_000, "num_threads": 1}
    core = EngineCore(EngineArgs.from_kwargs(model="gpt2-tiny", **settings, **FORMS[form]))
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
    with core("mp1") as engine:
        assert isinstance(engine.executor, MultiprocExecutor)
        benchmark.pedantic(lambda: engine.executor.execute_model(nothing), rounds=2000, warmup_rounds=100)


def step_times(forms: list[str], count: int) -> dict[str, list[float]]:
    """Seconds of a decode step of `count` requests in each window, the forms taking turns."""
    with ExitStack() as stack:
        engines = {form: stack.enter_context(core(form)) for form in forms}
        for engine in engines.values():
            add_requests(engine, count)
        times: dict[str, list[float]] = {form: [] for form in forms}
        for _ in range(WINDOWS):
            for form, engine in engines.items():
                times[form].append(seconds_of(engine))
    return times


@pytest.mark.parametrize("count", [1, 32])
def test_a_decode_step(benchmark: BenchmarkFixture, count: int) -> None:
    """gpt2-tiny, greedy: a step with the worker in its own process, beside one in this process."""
    times: dict[str, list[float]] = {}
    benchmark.pedantic(lambda: times.update(step_times(["uni", "mp1"], count)), rounds=1)
    uni, mp = (statistics.median(times[form]) for form in ("uni", "mp1"))
    benchmark.extra_info["milliseconds_in_this_process"] = round(1e3 * uni, 3)
    benchmark.extra_info["milliseconds_in_its_own_process"] = round(1e3 * mp, 3)
    benchmark.extra_info["microseconds_more"] = round(1e6 * (mp - uni), 1)
    more = 1e6 * (min(times["mp1"]) - min(times["uni"]))
    benchmark.extra_info["microseconds_more_in_the_quickest_windows"] = round(more, 1)


def crossing(form: str, folder: Path) -> str:
    """Messages and bytes of a recorded run behind a front end: between processes, and between workers."""
    config = EngineArgs.from_kwargs(
        model="gpt2-tiny", kv_cache_memory_bytes=100_000_000, num_threads=1, trace=str(folder), **FORMS[form]
    )

    async def run() -> None:
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[])
        await llm.start()
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

        async def read(number: int) -> None:
            async for _ in llm.generate(llm.input_processor.process_inputs(f"r{number}", f"Say {number}:", params)):
                pass

        await asyncio.gather(*(read(number) for number in range(REQUESTS)))
        llm.shutdown()

    trace.hold("APIServer")
    open_trace(config)
    try:
        asyncio.run(asyncio.wait_for(run(), PATIENCE))
    finally:
        trace.close()
    recorded = read_run(folder)
    steps = sum(event.ph == "B" for event in recorded.named("engine.step"))
    sent = [
        (event.args.get("workers", 1), event.args["bytes"])
        for name in ("zmq.request_sent", "zmq.outputs_sent", "executor.step_sent", "worker.output_sent")
        for event in recorded.named(name)
    ]
    messages, size = sum(count for count, _ in sent), sum(count * each for count, each in sent)
    spans = [e for e in recorded.named("worker.collective") if e.ph == "B" and e.args["kind"] != "receive"]
    exchanged = sum(event.args["bytes"] for event in spans)
    tokens = REQUESTS * TOKENS
    return (
        f"{messages / steps:>13.1f}  {size / steps:>10,.0f}  {messages / tokens:>14.2f}  {size / tokens:>11,.0f}  "
        f"{len(spans) / steps:>14.1f}  {exchanged / steps:>10,.0f}"
    )


def test_every_form(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """One table: a decode step of 8 requests over that of one process, and all that is sent, the front end's messages included.

    An exchange is one worker's part in a collective of torch.distributed. Several engines (dp2) have no executor but uni.
    """
    timed = [form for form in FORMS if form != "dp2"]
    times: dict[str, list[float]] = {}
    benchmark.pedantic(lambda: times.update(step_times(timed, REQUESTS)), rounds=1)
    rows = [COLUMNS]
    for form in FORMS:
        more = "-"
        if form in times:
            over = [1e6 * (how(times[form]) - how(times["uni"])) for how in (statistics.median, min)]
            more = f"{over[0]:,.0f}, {over[1]:,.0f}"
        rows.append(f"{form:4}  {more:>29}  {crossing(form, tmp_path / form)}")
    benchmark.extra_info["table"] = rows
