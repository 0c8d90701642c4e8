"""Prompts and tokens on two engines against one engine with the same cores (`make bench`): what it costs, and what running requests gain while
long prompts arrive."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENCE
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.cpu import find_cores
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

ROUNDS = 3
STREAMS, TOKENS = 4, 120
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2-tiny": (480, {}),
    "gpt2": (960, {"load_format": "dummy", "dtype": "float32"}),
}
"""Model -> (tokens of a long prompt, its settings)."""
FORMS: dict[str, dict[str, Any]] = {"one engine": {}, "1:1": {"disaggregate": "1:1"}}
_numbers, _rng = itertools.count(), random.Random(1)
Both = tuple[asyncio.Runner, dict[str, AsyncLLM], int]


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """They take turns."""
    length, settings = MODELS[request.param]
    with asyncio.Runner() as loop:
        started: dict[str, AsyncLLM] = {}

        async def start(form: str) -> None:
            threads = max(1, find_cores().compute // (2 if FORMS[form] else 1))
            own = {"num_threads": threads, "kv_cache_memory_bytes": 400_000_000} | settings | FORMS[form]
            started[form] = AsyncLLM.from_vllm_config(
                EngineArgs.from_kwargs(model=request.param, **own), stat_loggers=[]
            )
            await started[form].start()
            await read(started[form], length, 4)

        try:
            for form in FORMS:
                loop.run(asyncio.wait_for(start(form), PATIENCE))
            yield loop, started, length
        finally:
            for llm in started.values():
                llm.shutdown()


async def read(llm: AsyncLLM, length: int, tokens: int) -> list[float]:
    """When each token of a new prompt came, counted from when it was sent."""
    prompt = [_rng.randrange(400) for _ in range(length)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    request = llm.input_processor.process_inputs(f"r{next(_numbers)}", prompt, params)
    begin, came = asyncio.get_running_loop().time(), list[float]()
    async for output in llm.generate(request, request.sampling_params, request.request_id):
        came += [asyncio.get_running_loop().time() - begin] * len(output.outputs[0].token_ids)
    return came


def gaps(came: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(came)]


def test_running_requests_while_long_prompts_arrive(benchmark: BenchmarkFixture, both: Both) -> None:
    """Streams of short prompts run; long ones of one token come one after another. Time per output token of the streams, TTFT of the long ones, and
    how many of these were computed meanwhile."""
    loop, started, length = both
    told: dict[str, dict[str, list[float]]] = {form: {"tpot": [], "ttft": [], "rate": []} for form in FORMS}

    async def serve(form: str) -> None:
        llm, values = started[form], told[form]
        begin, count = asyncio.get_running_loop().time(), 0
        streams = [asyncio.create_task(read(llm, 8, TOKENS)) for _ in range(STREAMS)]
        while not all(stream.done() for stream in streams):
            values["ttft"] += await read(llm, length, 1)
            count += 1
        values["rate"].append(count / (asyncio.get_running_loop().time() - begin))
        for stream in streams:
            values["tpot"] += gaps(await stream)

    def one_round() -> None:
        for form in FORMS:
            loop.run(asyncio.wait_for(serve(form), PATIENCE))

    benchmark.pedantic(one_round, rounds=ROUNDS)
    one, two = told["one engine"], told["1:1"]
    for name, place in (("p50", 50), ("p99", 99)):
        before, after = (statistics.quantiles(each["tpot"], n=100)[place - 1] for each in (one, two))
        benchmark.extra_info[f"tpot_{name}"] = (
            f"{1e3 * before:.1f} ms; 1:1 {1e3 * after:.1f} ms; one engine / 1:1 {before / after:.2f}"
        )
    for name in ("ttft", "rate"):
        before, after = (statistics.median(each[name]) for each in (one, two))
        benchmark.extra_info[f"long_{name}"] = f"{before:.3f}; 1:1 {after:.3f}; one engine / 1:1 {before / after:.2f}"


def test_what_it_costs_a_quiet_server(benchmark: BenchmarkFixture, both: Both) -> None:
    """One long prompt at a time: TTFT with the way of its blocks, and the time per token, with half of the cores."""
    loop, started, length = both
    ttft: dict[str, list[float]] = {form: [] for form in FORMS}
    tpot: dict[str, list[float]] = {form: [] for form in FORMS}

    async def serve(form: str) -> None:
        came = await read(started[form], length, 32)
        ttft[form].append(came[0])
        tpot[form] += gaps(came)

    def one_round() -> None:
        for form in FORMS:
            loop.run(asyncio.wait_for(serve(form), PATIENCE))

    benchmark.pedantic(one_round, rounds=2 * ROUNDS)
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        one, two = (statistics.median(values[form]) for form in FORMS)
        benchmark.extra_info[name] = f"{1e3 * one:.1f} ms; 1:1 {1e3 * two:.1f} ms; 1:1 / one engine {two / one:.2f}"
