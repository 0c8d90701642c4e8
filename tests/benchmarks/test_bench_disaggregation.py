"""Prompts and tokens on two engines against one engine with the same cores (`make bench`): what it costs, what running requests gain while
long prompts arrive, and up to which length a prompt had better be computed where its answer is."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from patience import PATIENCE
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.cpu import find_cores
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

ROUNDS, STREAMS = 3, 4
LENGTH = 480
"""Tokens of a long prompt."""
SHORT = (32, 128)
"""Tokens of prompts that go both ways."""
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2-tiny": (12, {}),
    "gpt2": (3, {"load_format": "dummy", "dtype": "float32"}),
}
"""Model -> (long prompts of a round, its settings). The prompts are counted, not the tokens beside them: in one engine a token waits for a whole prompt."""
FORMS: dict[str, dict[str, Any]] = {"one engine": {}, "1:1": {"disaggregate": "1:1"}}
_numbers, _rng = itertools.count(), random.Random(1)
Both = tuple[asyncio.Runner, dict[str, AsyncLLM], int]


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """They take turns."""
    count, settings = MODELS[request.param]
    with asyncio.Runner() as loop:
        started: dict[str, AsyncLLM] = {}

        async def start(form: str) -> None:
            threads = max(1, find_cores().compute // (2 if FORMS[form] else 1))
            own = {"num_threads": threads, "kv_cache_memory_bytes": 400_000_000} | settings | FORMS[form]
            started[form] = AsyncLLM.from_vllm_config(
                EngineArgs.from_kwargs(model=request.param, **own), stat_loggers=[]
            )
            await started[form].start()
            await read(started[form], LENGTH, 4)

        try:
            for form in FORMS:
                loop.run(asyncio.wait_for(start(form), PATIENCE))
            yield loop, started, count
        finally:
            for llm in started.values():
                llm.shutdown()


async def read(llm: AsyncLLM, length: int, tokens: int, came: list[float] | None = None) -> list[float]:
    """When each token of a new prompt came, counted from when it was sent. `came` has those of a stream that is cancelled."""
    came = [] if came is None else came
    prompt = [_rng.randrange(400) for _ in range(length)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    request = llm.input_processor.process_inputs(f"r{next(_numbers)}", prompt, params)
    begin = asyncio.get_running_loop().time()
    async for output in llm.generate(request, request.sampling_params, request.request_id):
        came += [asyncio.get_running_loop().time() - begin] * len(output.outputs[0].token_ids)
    return came


def gaps(came: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(came)]


@asynccontextmanager
async def streams(llm: AsyncLLM) -> AsyncIterator[list[list[float]]]:
    """They run, one answer after another, and are broken off. Yields when their tokens came, answer by answer."""
    told: list[list[float]] = []

    async def stream() -> None:
        while True:
            told.append([])
            await read(llm, 8, 400, told[-1])

    running = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    while sum(map(len, told)) < 2 * STREAMS:
        await asyncio.sleep(0.001)
    try:
        yield told
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def test_running_requests_while_long_prompts_arrive(benchmark: BenchmarkFixture, both: Both) -> None:
    """Streams of short prompts run; long ones of one token come one after another. Time per output token of the streams, TTFT of the long ones, and
    how many of these were computed meanwhile."""
    loop, started, count = both
    told: dict[str, dict[str, list[float]]] = {form: {"tpot": [], "ttft": [], "rate": []} for form in FORMS}

    async def serve(form: str) -> None:
        llm, values = started[form], told[form]
        async with streams(llm) as came:
            begin = asyncio.get_running_loop().time()
            for _ in range(count):
                values["ttft"] += await read(llm, LENGTH, 1)
            values["rate"].append(count / (asyncio.get_running_loop().time() - begin))
        for each in came:
            values["tpot"] += gaps(each)

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
    loop, started, _ = both
    ttft: dict[str, list[float]] = {form: [] for form in FORMS}
    tpot: dict[str, list[float]] = {form: [] for form in FORMS}

    async def serve(form: str) -> None:
        came = await read(started[form], LENGTH, 32)
        ttft[form].append(came[0])
        tpot[form].append((came[-1] - came[0]) / (len(came) - 1))

    def one_round() -> None:
        for form in FORMS:
            loop.run(asyncio.wait_for(serve(form), PATIENCE))

    benchmark.pedantic(one_round, rounds=ROUNDS)
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        one, two = (statistics.median(values[form]) for form in FORMS)
        benchmark.extra_info[name] = f"{1e3 * one:.1f} ms; 1:1 {1e3 * two:.1f} ms; 1:1 / one engine {two / one:.2f}"


@pytest.mark.parametrize("length", SHORT)
def test_the_way_round_and_straight(length: int, benchmark: BenchmarkFixture, both: Both) -> None:
    """A prompt that passes the prefill engine, and one that the decode engine computes, while streams run there: TTFT, and the longest time that a stream
    waits for a token meanwhile. This is what `--max-local-prefill-length` is for."""
    loop, started, _ = both
    ways = {"round": 0, "straight": length}
    ttft: dict[str, list[float]] = {way: [] for way in ways}
    longest: dict[str, list[float]] = {way: [] for way in ways}
    client: Any = started["1:1"].engine_core

    async def serve(way: str) -> None:
        client.max_local_prefill_length = ways[way]
        async with streams(started["1:1"]) as came:
            before = [len(each) for each in came]
            ttft[way] += await read(started["1:1"], length, 1)
            waited = [gaps(each[max(0, count - 1) :]) for each, count in zip(came, before, strict=False)]
            longest[way].append(statistics.median(max(each, default=0.0) for each in waited))

    def one_round() -> None:
        for way in ways:
            loop.run(asyncio.wait_for(serve(way), PATIENCE))

    benchmark.pedantic(one_round, rounds=2 * ROUNDS)
    for name, values in (("ttft", ttft), ("longest_gap", longest)):
        one, two = (statistics.median(values[way]) for way in ways)
        benchmark.extra_info[name] = (
            f"{1e3 * one:.1f} ms; straight {1e3 * two:.1f} ms; round / straight {one / two:.2f}"
        )
