"""Engines that do what a test says, for the tests of several engines behind one front end: no process, no model, no clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from server_under_test import byte_config

from stage02_server.features.echo_engine.echo_engine import EchoCoreClient
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, EngineStartError, InvalidRequestError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient
from stage03_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    SchedulerStats,
)


def config_of(size: int, **settings: Any) -> VllmConfig:
    """The settings of `size` engines without a model."""
    config = byte_config()
    own = {f"data_parallel_{name}": value for name, value in settings.items()}
    return replace(config, data_parallel_config=replace(config.data_parallel_config, data_parallel_size=size, **own))


def token_at(request: EngineCoreRequest, place: int) -> int:
    """The token that every engine gives a request there: it follows from prompt and seed."""
    return hash((*request.prompt_token_ids, request.sampling_params.seed, place)) % 250


class SteeredEngine(AsyncEngineCoreClient):
    """Runs at most `max_running` requests, and gives each a token when `step` is called."""

    max_running = 4

    def __init__(self, config: VllmConfig, index: int) -> None:
        self.config, self.index = config, index
        self.requests: dict[str, EngineCoreRequest] = {}
        self.places: dict[str, int] = {}
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.answer: bool | Exception = True
        self.may_start = asyncio.Event()
        self.start_error: str | Exception | None = None
        self.preemptions = 0
        self.is_down = self.was_given_up = False
        self._said: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()

    async def start(self) -> EngineReady:
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error if isinstance(self.start_error, Exception) else EngineStartError(self.start_error)
        return EngineReady(num_gpu_blocks=100, max_model_len=64)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.requests[request.request_id] = request
        self.places[request.request_id] = 0

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    async def call(self, method: str, *args: Any) -> bool:
        self.calls.append(method)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def get_output_async(self) -> EngineCoreOutputs:
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said

    @property
    def stats(self) -> SchedulerStats:
        running = min(len(self.requests), self.max_running)
        return SchedulerStats(running, len(self.requests) - running, num_preemptions=self.preemptions)

    def step(self, only: str | None = None, changed: bool = False) -> None:
        """A token for each that runs; `changed`: another one than it should be."""
        outputs = []
        for request_id, request in list(self.requests.items())[: self.max_running]:
            if only in (None, request_id):
                outputs.append(self._next(request, changed))
        self._said.put_nowait(EngineCoreOutputs(outputs, self.stats))

    def _next(self, request: EngineCoreRequest, changed: bool) -> EngineCoreOutput:
        place = self.places[request.request_id]
        self.places[request.request_id] = place + 1
        output = EngineCoreOutput(request.request_id, [token_at(request, place) + changed])
        if place + 1 == request.sampling_params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
            del self.requests[request.request_id]
        return output

    def die(self) -> None:
        self.requests.clear()
        self._said.put_nowait(EngineDeadError("It was killed."))

    def stands_still(self) -> None:
        self.was_given_up = True

    def shutdown(self) -> None:
        self.is_down = True


class MortalEcho(EchoCoreClient):
    """The echo engine, which can die, and starts again when it may."""

    def __init__(self, config: VllmConfig, index: int) -> None:
        super().__init__(byte_config(), 0.0)
        self.index = index
        self.may_start, self._is_dead = asyncio.Event(), False
        self.may_start.set()
        self.start_error: str | None = None
        self.changes = False  # does it give other tokens than it should?

    async def start(self) -> EngineReady:
        await self.may_start.wait()
        if self.start_error is not None:
            raise EngineStartError(self.start_error)
        return await super().start()

    def _next(self, running: Any) -> EngineCoreOutput:
        output = super()._next(running)
        output.new_token_ids = [token + self.changes for token in output.new_token_ids]
        return output

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await super().get_output_async()
        if self._is_dead:
            raise EngineDeadError("The engine process ended unexpectedly (exit code -9).")
        return outputs

    async def call(self, method: str, *args: Any) -> bool:
        if method == "unknown":
            raise InvalidRequestError("no such method")
        return await super().call(method)

    def die(self) -> None:
        self._is_dead = self._has_aborted = True
        self._work.set()


class Engines:
    """Makes engines and remembers them: `engines[i]` is the newest with number i. Those made after the first do not start by
    themselves."""

    def __init__(self, make: Callable[[VllmConfig, int], Any] = SteeredEngine) -> None:
        self.made: list[Any] = []
        self._make = make
        self.start_errors: list[str | Exception] = []
        self.waits = True  # does an engine wait to be told that it may start, if there was one with its number before?

    def __call__(self, config: VllmConfig, index: int) -> Any:
        engine = self._make(config, index)
        if self.waits and index in [each.index for each in self.made]:
            engine.may_start.clear()
        else:
            engine.may_start.set()
        if self.start_errors:
            engine.start_error = self.start_errors.pop(0)
        self.made.append(engine)
        return engine

    def __getitem__(self, index: int) -> Any:
        return [each for each in self.made if each.index == index][-1]


class Front(Protocol):
    """A client over steered engines, and what reads from it."""

    client: Any

    async def read(self) -> None: ...


F = TypeVar("F", bound=Front)


@asynccontextmanager
async def started(front: F) -> AsyncIterator[F]:
    """Its engines are started, and what they say is read."""
    front.client.start_process()
    await front.client.start()
    reading = asyncio.create_task(front.read())
    try:
        yield front
    finally:
        front.client.shutdown()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def settle() -> None:
    """Let everything happen that can, without time."""
    for _ in range(60):
        await asyncio.sleep(0)
