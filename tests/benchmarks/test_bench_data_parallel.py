"""Two engines against one with the same cores (`make bench`): tokens per second, and what crosses the sockets for a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.cpu import find_cores
from stage03_engine.config import VllmConfig
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stage03_engine.tracing import open_trace
from stagetrace import read_run, trace

REQUESTS, TOKENS, ROUNDS = 32, 64, 7
SETTINGS: dict[str, Any] = {"model": "gpt2-tiny", "kv_cache_memory_bytes": 100_000_000}


def config_of(engines: int, **more: Any) -> VllmConfig:
    """All cores, divided among the engines."""
    threads = max(1, find_cores().compute // engines)
    return EngineArgs.from_kwargs(**SETTINGS, data_parallel_size=engines, num_threads=threads, **more)


async def ask(llm: AsyncLLM, number: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    made = [llm.input_processor.process_inputs(f"r{number}-{i}", f"Request {i}:", params) for i in range(REQUESTS)]

    async def read(request: Any) -> None:
        async for _ in llm.generate(request, request.sampling_params, request.request_id):
            pass

    await asyncio.gather(*(read(request) for request in made))


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[asyncio.Runner, dict[int, AsyncLLM]]]:
    """One engine and two engines, which take turns."""
    with asyncio.Runner() as loop:
        started: dict[int, AsyncLLM] = {}

        async def start(engines: int) -> None:
            started[engines] = AsyncLLM.from_vllm_config(config_of(engines), stat_loggers=[])
            await started[engines].start()
            await ask(started[engines], -1)

        try:
            for engines in (1, 2):
                loop.run(asyncio.wait_for(start(engines), PATIENCE))
            yield loop, started
        finally:
            for llm in started.values():
                llm.shutdown()


def test_two_engines_on_the_cores_of_one(
    benchmark: BenchmarkFixture, both: tuple[asyncio.Runner, dict[int, AsyncLLM]]
) -> None:
    loop, started = both
    rates: dict[int, list[float]] = {1: [], 2: []}

    async def timed(engines: int, number: int) -> None:
        begin = asyncio.get_running_loop().time()
        await ask(started[engines], number)
        rates[engines].append(REQUESTS * TOKENS / (asyncio.get_running_loop().time() - begin))

    def one_round() -> None:
        for engines in (1, 2):
            loop.run(asyncio.wait_for(timed(engines, len(rates[engines])), PATIENCE))

    benchmark.pedantic(one_round, rounds=ROUNDS)
    best = {engines: max(each) for engines, each in rates.items()}
    benchmark.extra_info["tokens_per_second_1"] = round(best[1])
    benchmark.extra_info["tokens_per_second_2"] = round(best[2])
    benchmark.extra_info["ratio"] = round(best[2] / best[1], 2)


@pytest.mark.parametrize("engines", [1, 2])
def test_what_crosses_the_sockets(benchmark: BenchmarkFixture, engines: int, tmp_path: Path) -> None:
    config = config_of(engines, trace=str(tmp_path))

    async def run() -> None:
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[])
        await llm.start()
        await ask(llm, 0)
        llm.shutdown()

    def traced() -> None:
        trace.hold("APIServer")
        open_trace(config)
        try:
            asyncio.run(asyncio.wait_for(run(), PATIENCE))
        finally:
            trace.close()

    benchmark.pedantic(traced, rounds=1)
    recorded, tokens = read_run(tmp_path), REQUESTS * TOKENS
    for name, told in (("zmq.request_sent", "in"), ("zmq.outputs_sent", "out")):
        sent = recorded.named(name)
        benchmark.extra_info[f"messages_{told}_per_token"] = round(len(sent) / tokens, 3)
        benchmark.extra_info[f"bytes_{told}_per_token"] = round(sum(event.args["bytes"] for event in sent) / tokens, 1)
    assert len(recorded.named("engine.ready")) == engines
