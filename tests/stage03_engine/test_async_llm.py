"""AsyncLLM over a real engine process: many requests, slow readers, cancelled readers, dead engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from patience import PATIENCE
from prometheus_client import CollectorRegistry

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import EngineDeadError, EngineStartError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.prometheus.prometheus import PrometheusStatLogger
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams


@asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[tuple[AsyncLLM, CollectorRegistry]]:
    settings = {"kv_cache_memory_bytes": 200_000_000} | settings
    config = EngineArgs.from_kwargs(model="gpt2-tiny", **settings)
    registry = CollectorRegistry()
    llm = AsyncLLM.from_vllm_config(config, stat_loggers=[PrometheusStatLogger(config, registry, "gpt2-tiny")])
    try:
        await llm.start()
        yield llm, registry
    finally:
        llm.shutdown()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


class Shared:
    """One engine, and the loop in which it lives, for all tests that only ask it something."""

    def __init__(self, loop: asyncio.Runner, llm: AsyncLLM, registry: CollectorRegistry) -> None:
        self._loop, self.llm, self.registry = loop, llm, registry

    def run(self, test: Callable[[AsyncLLM, CollectorRegistry], Awaitable[None]]) -> None:
        """Run the test, which must leave no request behind."""
        self._loop.run(asyncio.wait_for(test(self.llm, self.registry), PATIENCE))
        assert self.llm.num_unfinished_requests == 0 and not self.llm.errored


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with asyncio.Runner() as loop:
        running = engine()
        llm, registry = loop.run(running.__aenter__())
        yield Shared(loop, llm, registry)
        process = llm.engine_core._process
        assert psutil.pid_exists(process.pid) and process._directory.exists()
        loop.run(running.__aexit__(None, None, None))
        assert not psutil.pid_exists(process.pid) and not process._directory.exists(), "shutdown leaves nothing behind"


async def collect(llm: AsyncLLM, name: str, prompt: str, params: SamplingParams) -> tuple[str, list[int]]:
    """Read a whole request; with deltas, put them together."""
    text, tokens = "", []
    async for output in llm.generate(prompt, params, name):
        completion = output.outputs[0]
        if params.output_kind == RequestOutputKind.DELTA:
            text, tokens = text + completion.text, tokens + completion.token_ids
        else:
            text, tokens = completion.text, completion.token_ids
    return text, tokens


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something has become true; the test's own timeout bounds it."""
    while not condition():
        await asyncio.sleep(0)


def gauge(registry: CollectorRegistry, name: str) -> float:
    return registry.get_sample_value(name, {"model_name": "gpt2-tiny", "engine": "0"}) or 0.0


def test_output_kinds_processes_and_readers_agree(shared: Shared) -> None:
    params = {kind: SamplingParams(temperature=0, max_tokens=24, output_kind=kind) for kind in RequestOutputKind}
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        inproc = llm.generate("ROMEO:", params[RequestOutputKind.FINAL_ONLY])[0].outputs[0]

    async def test(llm: AsyncLLM, _: CollectorRegistry) -> None:
        results = await asyncio.gather(*(collect(llm, f"k{k}", "ROMEO:", p) for k, p in params.items()))
        assert results == [(inproc.text, inproc.token_ids)] * 3

    shared.run(test)


def test_a_slow_reader_gets_merged_deltas_and_loses_nothing(shared: Shared) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA, logprobs=0)

    async def test(llm: AsyncLLM, _: CollectorRegistry) -> None:
        expected = await collect(llm, "fast", "ROMEO:", params)
        queue = await llm.add_request("slow", "ROMEO:", params)
        await until(lambda: llm.num_unfinished_requests == 0)  # the engine is done before we read at all
        output = await queue.get()
        assert output.finished and (output.outputs[0].text, output.outputs[0].token_ids) == expected
        assert len(output.outputs[0].logprobs or []) == 40

    shared.run(test)


def test_a_reader_that_leaves_frees_its_blocks(shared: Shared) -> None:
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def test(llm: AsyncLLM, registry: CollectorRegistry) -> None:
        reader = llm.generate("ROMEO:", endless, "r")
        await anext(reader)
        await until(lambda: gauge(registry, "vllm:kv_cache_usage_perc") > 0)
        await reader.aclose()
        assert llm.num_unfinished_requests == 0
        await until(lambda: gauge(registry, "vllm:kv_cache_usage_perc") == 0)
        assert gauge(registry, "vllm:num_requests_running") == 0
        task = asyncio.create_task(collect(llm, "cancelled", "ROMEO:", endless))
        await until(lambda: gauge(registry, "vllm:num_requests_running") == 1)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: gauge(registry, "vllm:num_requests_running") == 0)

    shared.run(test)


def test_the_prefix_cache_is_not_reset_under_a_running_request(shared: Shared) -> None:
    endless = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def test(llm: AsyncLLM, _: CollectorRegistry) -> None:
        reader = llm.generate("ROMEO:", endless, "r")
        await anext(reader)
        assert not await llm.call("reset_prefix_cache")
        await reader.aclose()
        assert await llm.call("reset_prefix_cache")

    shared.run(test)


def test_a_stop_string_ends_the_request_in_the_engine_too(shared: Shared) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, stop=["so,"])

    async def test(llm: AsyncLLM, registry: CollectorRegistry) -> None:
        text, _ = await collect(llm, "r", "To be, or", params)
        assert text == " I'll be "
        await until(lambda: gauge(registry, "vllm:num_requests_running") == 0)

    shared.run(test)


def test_seeded_requests_do_not_depend_on_their_neighbours(shared: Shared) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=24, top_p=0.95)

    async def test(llm: AsyncLLM, _: CollectorRegistry) -> None:
        alone = await collect(llm, "alone", "ROMEO:", params)
        noise = [collect(llm, f"n{i}", "JULIET: " * (i + 1), SamplingParams(max_tokens=30)) for i in range(9)]
        together = await asyncio.gather(*noise[:5], collect(llm, "together", "ROMEO:", params), *noise[5:])
        assert together[5] == alone

    shared.run(test)


def test_64_requests_at_once_get_what_each_gets_alone(shared: Shared) -> None:
    """Every fourth is asked alone too."""
    params = SamplingParams(temperature=0, max_tokens=16)
    prompts = [
        f"{name}: {verb} {i}"
        for i, (name, verb) in enumerate(zip(["ROMEO", "JULIET", "All", "KING"] * 16, "abcdefgh" * 8))
    ]

    async def test(llm: AsyncLLM, _: CollectorRegistry) -> None:
        alone = [await collect(llm, f"a{i}", prompt, params) for i, prompt in enumerate(prompts[::4])]
        together = await asyncio.gather(*(collect(llm, f"t{i}", p, params) for i, p in enumerate(prompts)))
        assert together[::4] == alone

    shared.run(test)


def test_every_waiting_reader_hears_of_a_killed_engine_at_once() -> None:
    endless = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)

    async def test() -> None:
        async with engine() as (llm, registry):
            readers = [asyncio.create_task(collect(llm, f"r{i}", "ROMEO:", endless)) for i in range(4)]
            await until(lambda: gauge(registry, "vllm:num_requests_running") == 4)
            os.kill(llm.engine_core._process.pid, signal.SIGKILL)
            results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), PATIENCE)
            assert [type(result) for result in results] == [EngineDeadError] * 4
            assert llm.errored and isinstance(await llm.wait_dead(), EngineDeadError)
            with pytest.raises(EngineDeadError):
                await collect(llm, "late", "ROMEO:", endless)

    run(test)


def test_an_exception_in_the_engine_arrives_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token id that only the engine can find wrong: the front end's own check is bypassed."""

    async def test() -> None:
        async with engine() as (llm, _):
            request = llm.input_processor.process_inputs("r", "ROMEO:", SamplingParams(max_tokens=4))
            request.prompt_token_ids = [999_999]
            with pytest.raises(EngineDeadError, match="IndexError"):
                async for _ in llm.generate(request, request.sampling_params, request.request_id):
                    pass

    run(test)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_cache_memory_bytes": 200_000}, "one request may need 512"),
        ({"device": "cuda"}, "torch finds no usable GPU"),
    ],
)
def test_an_engine_that_cannot_start_says_why(settings: dict[str, Any], reason: str) -> None:
    import torch

    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")

    async def test() -> None:
        with pytest.raises(EngineStartError, match=reason):
            async with engine(**settings):
                pass

    run(test)
