"""The engine core on the event loop of the server itself: `serve --in-process`, for a debugger.

Steps run in the main thread, between two turns of the event loop, so `print`, `breakpoint()` and pdb in scheduler, model or
sampler use the terminal. While a step runs, or waits in a debugger, HTTP waits too. vLLM has no counterpart: its
AsyncLLM always has engine processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from stage03_engine.args.check import check_one_engine
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, EngineStartError, InvalidRequestError, StagesError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient
from stage03_engine.frontend.features.in_process.inproc_client import MAKE_CORE
from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, refusal
from stage03_engine.mixins import load
from stage03_engine.tracing import trace_message
from stagetrace import trace

logger = logging.getLogger(__name__)
T = TypeVar("T")
BREATH_SECONDS = (
    0.001  # between two steps: enough turns of the event loop for a request to come in or a chunk to go out
)


class SteppedCore(Protocol):
    """What AsyncInprocClient needs of an engine core, which is handed in: the front end does not import it."""

    num_gpu_blocks: int

    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def call(self, method: str, *args: Any) -> Any: ...
    def step(self) -> EngineCoreOutputs: ...
    def shutdown(self) -> None: ...

    @property
    def has_unfinished_requests(self) -> bool: ...


def serve_in_process(config: VllmConfig) -> AsyncInprocClient:
    """The client of a core that is made here: no other way brings torch into this process. Raises ConfigError."""
    return AsyncInprocClient(config, load(MAKE_CORE))


class AsyncInprocClient(AsyncEngineCoreClient):
    """Each `get_output_async` runs one step of the core, when there is something to do.

    Invariant: after an exception inside the core nothing touches it again; every call raises the same EngineDeadError.
    """

    def __init__(self, config: VllmConfig, make_core: Callable[[VllmConfig], SteppedCore]) -> None:
        check_one_engine(config, "--in-process")
        self._config, self._make_core = config, make_core
        self._core: SteppedCore | None = None
        self._news: deque[EngineCoreOutputs] = deque()  # outputs that no step made
        self._work = asyncio.Event()
        self._dead: EngineDeadError | None = None
        if trace.on:
            trace.emit("client.created", kind="AsyncInprocClient", engine_ranks=[0])

    async def start(self) -> EngineReady:
        """Load the model, blocking the event loop. Raises StagesError."""
        try:
            self._core = self._make_core(self._config)
        except StagesError:
            raise
        except Exception as error:
            logger.exception("the engine could not start")
            raise EngineStartError(f"{type(error).__name__}: {error}") from error
        return EngineReady(self._core.num_gpu_blocks, self._config.max_model_len)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        def add(core: SteppedCore) -> None:
            try:
                core.add_request(request)
            except ValueError as error:  # this request's fault: its neighbours go on
                self._news.append(refusal(request.request_id, error))

        self._run(add)
        self._work.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._run(lambda core: core.abort_requests(request_ids))
        self._publish_news()

    async def call(self, method: str, *args: Any) -> Any:
        def call(core: SteppedCore) -> tuple[Any, InvalidRequestError | None]:
            try:
                return core.call(method, *args), None
            except InvalidRequestError as error:  # the caller's fault: the engine goes on
                return False, error

        result, refused = self._run(call)
        self._publish_news()
        if refused is not None:
            raise refused
        return result

    def _publish_news(self) -> None:
        """If no step will carry them: new numbers for the metrics, new events for watchers."""
        if not self._run(lambda core: core.has_unfinished_requests):
            self._news.append(self._run(lambda core: core.step()))
        self._work.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        while True:
            if self._news:
                return self._news.popleft()
            if self._run(lambda core: core.has_unfinished_requests):
                await asyncio.sleep(BREATH_SECONDS)
                return self._run(lambda core: core.step())
            self._work.clear()
            await self._work.wait()

    def _run(self, work: Callable[[SteppedCore], T]) -> T:
        """Run `work` on the core. Any exception kills the core: it is logged, and every later call raises it again."""
        if self._dead is not None:
            raise self._dead
        assert self._core is not None, "start() comes first"
        try:
            return work(self._core)
        except Exception as error:
            logger.exception("the engine died")
            if trace.on:
                trace.emit("engine.failed", message=trace_message(error))
            self._dead = EngineDeadError(f"The engine stopped: {type(error).__name__}: {error}")
            self._work.set()
            raise self._dead from error

    def shutdown(self) -> None:
        core, self._core = self._core, None
        self._dead = self._dead or EngineDeadError("The engine is shutting down.")
        if core is not None:
            core.shutdown()
