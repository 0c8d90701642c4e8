"""Which engine gets a request: by prefix, by load, or one after the other (`make bench`). Simulated, where the figures are the same everywhere, and on real
engines, which take the three policies in turns: they keep their weights, and begin each time with empty caches."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE
from pytest_benchmark.fixture import BenchmarkFixture
from routing_simulation import simulation

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.data_parallel.balancing import choose_engine
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

score: Any = simulation()
POLICIES: dict[str, Callable[[], Any]] = {
    "prefix": lambda: choose_engine,
    "load": lambda: score.least_busy,
    "round robin": score.round_robin,
}
ROUNDS, SEEDS = 5, 6
SIZE, BLOCKS = 16, 64
Talk = tuple[list[int], list[list[int]]]
"""(its beginning, what is new in each turn)."""


@pytest.mark.parametrize("engines", [2, 4])
@pytest.mark.parametrize("load", score.LOADS)
def test_simulated(benchmark: BenchmarkFixture, load: str, engines: int) -> None:
    found: dict[str, list[Any]] = defaultdict(list)

    def all_policies() -> None:
        for seed in range(SEEDS):
            for name, make in POLICIES.items():
                found[name].append(score.serve(score.LOADS[load](str(seed), engines), make()))

    benchmark.pedantic(all_policies, rounds=1)
    for name, scores in found.items():
        ttft, rate, hits = (
            statistics.mean(getattr(each, key) for each in scores) for key in ("ttft", "throughput", "hits")
        )
        benchmark.extra_info[name] = f"TTFT {ttft:.0f} ticks, {rate:.0f} tokens per 1,000 ticks, {hits:.0f} % found"


def chats(draw: random.Random, engines: int) -> list[Talk]:
    """Four turns each; the caches of all engines together hold half of what is said."""
    beginnings = [[draw.randrange(400) for _ in range(96)] for _ in range(4)]
    turns = [[[draw.randrange(400) for _ in range(40)] for _ in range(4)] for _ in range(6 * engines)]
    return [(draw.choice(beginnings), each) for each in turns]


def hot(draw: random.Random, engines: int) -> list[Talk]:
    """Single questions that all begin alike."""
    beginning = [draw.randrange(400) for _ in range(320)]
    return [(beginning, [[draw.randrange(400) for _ in range(10)]]) for _ in range(20 * engines)]


class Measured:
    """One policy's run."""

    def __init__(self) -> None:
        self.ttfts, self.prompts, self.cached, self.tokens, self.seconds = list[float](), 0, 0, 0, 0.0


@pytest.fixture(scope="module", params=[2, 4], ids=["2 engines", "4 engines"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[asyncio.Runner, AsyncLLM, int]]:
    config = EngineArgs.from_kwargs(
        model="gpt2-tiny", data_parallel_size=request.param, data_parallel_routing="prefix", num_threads=1, block_size=SIZE,
        num_gpu_blocks_override=BLOCKS + 1,
    )  # fmt: skip
    with asyncio.Runner() as loop:

        async def start() -> AsyncLLM:
            llm = AsyncLLM.from_vllm_config(config, stat_loggers=[])
            await llm.start()
            return llm

        llm = loop.run(asyncio.wait_for(start(), PATIENCE))
        try:
            yield loop, llm, request.param
        finally:
            llm.shutdown()


async def say(llm: AsyncLLM, name: str, prompt: list[int], measured: Measured) -> list[int]:
    """The answer."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    request, clock = llm.input_processor.process_inputs(name, prompt, params), asyncio.get_running_loop().time
    asked, answer = clock(), list[int]()
    async for output in llm.generate(request, params, name):
        if not answer:
            measured.ttfts.append(clock() - asked)
            measured.cached += output.num_cached_tokens
        answer += output.outputs[0].token_ids
    measured.prompts += len(prompt)
    measured.tokens += len(answer)
    return answer


async def talk(llm: AsyncLLM, name: str, spoken: Talk, measured: Measured) -> None:
    history, turns = spoken
    for number, new in enumerate(turns):
        history = [*history, *new]
        history += await say(llm, f"{name}-{number}", history, measured)


@pytest.mark.parametrize("load", [chats, hot], ids=["chats", "hot"])
def test_real_engines(
    benchmark: BenchmarkFixture,
    served: tuple[asyncio.Runner, AsyncLLM, int],
    load: Callable[[random.Random, int], list[Talk]],
) -> None:
    loop, llm, engines = served
    runs: dict[str, list[Measured]] = defaultdict(list)
    client = llm.engine_core
    assert isinstance(client, DPLBAsyncMPClient)

    async def run(name: str, number: int) -> None:
        while not await client.call("reset_prefix_cache"):
            await asyncio.sleep(0)
        client._balancer._choose = POLICIES[name]()
        measured, clock = Measured(), asyncio.get_running_loop().time
        begin = clock()
        spoken = load(random.Random(number), engines)
        await asyncio.gather(*(talk(llm, f"{name}-{number}-{i}", each, measured) for i, each in enumerate(spoken)))
        measured.seconds = clock() - begin
        runs[name].append(measured)

    def in_turns() -> None:
        for name in POLICIES:
            loop.run(asyncio.wait_for(run(name, len(runs[name])), PATIENCE))

    benchmark.pedantic(in_turns, rounds=ROUNDS, warmup_rounds=1)
    for name, each in runs.items():
        pairs = list(zip(each, runs["prefix"]))[1:]
        ttft = statistics.median(statistics.mean(a.ttfts) / statistics.mean(b.ttfts) for a, b in pairs)
        rate = statistics.median((a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in pairs)
        hits = statistics.mean(a.cached / a.prompts for a, _ in pairs)
        benchmark.extra_info[name] = f"{100 * hits:.0f} % found; against prefix: TTFT {ttft:.2f}, tokens/s {rate:.2f}"
