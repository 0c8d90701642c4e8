"""The engine's front end on an event loop: what the API server holds.

Source: vllm/v1/engine/async_llm.py (AsyncLLM).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Protocol

from stage03_engine.arg_utils import AsyncEngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient, make_client
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.metrics import IterationStats, StatLoggers, make_stat_loggers
from stage03_engine.frontend.output_processor import OutputProcessor, RequestOutputCollector
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady
from stage03_engine.mixins import load
from stage03_engine.outputs import RequestOutput
from stage03_engine.plugins import find, wanted
from stage03_engine.sampling_params import SamplingParams
from stage03_engine.tracing import trace_message, traced_params
from stagetrace import trace

AT_ONCE = 32  # outputs of a step that are processed before other tasks get a turn on the event loop


class OutputListener(Protocol):
    """A feature that sees the outputs of every engine step (the live view of the scheduler)."""

    def received(self, outputs: EngineCoreOutputs) -> None: ...
    def close(self) -> None: ...


class AsyncLLM:
    """Many concurrent `generate()` calls over one engine core.

    One background task, the output handler, pulls each step's outputs from the engine core, turns them into text and
    puts them into the collectors that the `generate()` calls wait for.
    """

    def __init__(self, config: VllmConfig, client: AsyncEngineCoreClient, stat_loggers: StatLoggers | None) -> None:
        if trace.on:
            trace.emit("async_llm.init", model=config.model_config.model)
        self.vllm_config = config
        self.stat_loggers = make_stat_loggers(config, stat_loggers)
        self.engine_core = client
        self.engine_core.start_process()  # first: the engine imports and loads while we go on
        self.tokenizer = init_tokenizer_from_configs(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer)
        if trace.on:
            trace.emit("stat_loggers.created", loggers=[type(each).__name__ for each in self.stat_loggers])
        self.listeners: list[OutputListener] = []
        self.last_outputs_at = 0.0  # time.monotonic(); 0 before the first
        self.outgoing: list[Callable[[EngineCoreRequest], None]] = []  # features that see or change each request
        self.dead_error: EngineDeadError | None = None
        self.ready: EngineReady | None = None  # what the engine core said when it could serve
        self._dead = asyncio.Event()
        self._output_handler: asyncio.Task[None] | None = None
        for hook in config.hooks("async_llm"):
            load(hook)(self)

    @classmethod
    def from_vllm_config(
        cls,
        config: VllmConfig,
        client: AsyncEngineCoreClient | None = None,
        stat_loggers: StatLoggers | None = None,
    ) -> AsyncLLM:
        """Start an engine without waiting for it; `start()` waits.

        `client` replaces the engine process. Raises ConfigError if the tokenizer or a stat logger is unusable.
        """
        engine = client or make_client(config)
        try:
            return cls(config, engine, stat_loggers)
        except BaseException:
            engine.shutdown()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, stat_loggers: StatLoggers | None = None) -> AsyncLLM:
        """The same from settings: `AsyncEngineArgs(model="gpt2-tiny")`. Raises as these do."""
        return cls.from_vllm_config(engine_args.create_engine_config()[0], stat_loggers=stat_loggers)

    async def start(self) -> EngineReady:
        """Wait until the engine core can serve, then run the output handler; a second call finds it done. Raises EngineStartError."""
        if self.ready is not None:
            return self.ready
        self.ready = await self.engine_core.start()
        for stat_logger in self.stat_loggers:
            stat_logger.engine_ready()
        self._output_handler = asyncio.create_task(self._run_output_handler())
        if trace.on:
            trace.emit("output_handler.started")
        return self.ready

    async def generate(
        self, prompt: EngineCoreRequest | Any, sampling_params: SamplingParams, request_id: str, **given: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield its outputs.

        The server's prompts are requests already, made by `input_processor.process_inputs`. Other callers give a text, token ids or
        vLLM's dictionaries, and what `request_of` takes besides. Closing or cancelling the iterator aborts the request in the
        engine. Raises EngineDeadError.
        """
        if trace.on:
            trace.emit("generate.start", req=request_id, sampling_params=traced_params(sampling_params))
        finished, number = False, 0
        queue = await self.add_request(request_id, prompt, sampling_params, **given)
        try:
            while not finished:
                output = await queue.get()
                finished, number = output.finished, number + 1
                if trace.on:
                    trace.emit("generate.yield", req=request_id, number=number, finished=finished)
                yield output
        finally:
            # Cancelled, closed early, or failed: nobody reads the rest, so the engine must stop.
            if not finished:
                await self.abort(request_id)

    async def add_request(
        self, request_id: str, prompt: EngineCoreRequest | Any, params: SamplingParams, **given: Any
    ) -> RequestOutputCollector:
        """Register a request and send it to the engine core. Raises EngineDeadError, ValueError for an id that is in use."""
        prompt_text: str | None = given.pop("prompt_text", None)
        self.check_health()
        if not isinstance(prompt, EngineCoreRequest):
            request_of = wanted("engine", "request_of", "what makes a request of a prompt")
            prompt, prompt_text = await request_of(self, request_id, prompt, params, **given)
        for feature in self.outgoing:
            feature(prompt)
        queue = RequestOutputCollector(prompt.sampling_params.output_kind)
        parts = self.output_processor.add_request(prompt, prompt_text, queue)
        try:
            for number, child in enumerate(parts, start=1):
                await self.engine_core.add_request_async(child)
                if number % 16 == 0:  # sending never waits, so give other tasks a turn
                    await asyncio.sleep(0)
        except BaseException:  # nobody will read the answers
            await self.abort(request_id)
            raise
        return queue

    async def abort(self, request_id: str, reason: str = "client is gone") -> None:
        """Stop a request and free its blocks; does nothing if it has already ended."""
        running = self.output_processor.abort_requests([request_id])
        if not running or self.errored:
            return
        if trace.on:
            trace.emit("request.aborted", req=request_id, reason=reason)
        for stat_logger in self.stat_loggers:
            stat_logger.request_aborted(self.engine_core.engine_of(running[0]))
        await self.engine_core.abort_requests_async(running)

    def __getattr__(self, name: str) -> Any:
        """The methods that features add."""
        if (method := find("async_llm", name)) is None:
            raise AttributeError(f"AsyncLLM has no attribute {name!r}")
        return partial(method, self)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core that is not part of serving requests ("start_profile"); False if it did nothing.

        Raises EngineDeadError, and InvalidRequestError if this engine has no such method, or that refuses.
        """
        self.check_health()
        return await self.engine_core.call(method, *args)

    async def _run_output_handler(self) -> None:
        try:
            while True:
                outputs = await self.engine_core.get_output_async()
                await self._process(outputs)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:  # a bug of ours must reach the waiting clients too, not leave them hanging
            self._die(EngineDeadError(f"The output handler failed: {error!r}"))
            raise

    async def _process(self, outputs: EngineCoreOutputs) -> None:
        """Hand one step's outputs to the collectors and the stat loggers; abort in the engine what a stop string ended."""
        for listener in self.listeners:
            listener.received(outputs)
        iteration, reqs_to_abort = IterationStats(), list[str]()
        self.last_outputs_at = iteration.now
        for start in range(0, len(outputs.outputs), AT_ONCE):
            some = outputs.outputs[start : start + AT_ONCE]
            reqs_to_abort += self.output_processor.process_outputs(some, iteration)[1]
            await asyncio.sleep(0)
        if reqs_to_abort:
            await self.engine_core.abort_requests_async(reqs_to_abort)
        for stat_logger in self.stat_loggers:
            stat_logger.record(outputs.scheduler_stats, iteration, outputs.engine_index)
        if trace.on and self.stat_loggers and outputs.outputs:
            tokens, finished = iteration.num_generation_tokens, len(iteration.finished)
            trace.emit("stats.recorded", step=outputs.step, generation_tokens=tokens, finished=finished)

    def _die(self, error: EngineDeadError) -> None:
        if trace.on:
            trace.emit("engine.dead", message=trace_message(error))
        self.dead_error = error
        self.output_processor.propagate_error(error)
        for listener in self.listeners:
            listener.close()
        self._dead.set()

    @property
    def errored(self) -> bool:
        """True once the engine is dead."""
        return self.dead_error is not None

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that still run or wait."""
        return len(self.output_processor.request_states)

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine is dead."""
        if self.dead_error is not None:
            raise self.dead_error

    async def wait_dead(self) -> EngineDeadError:
        """Returns when the engine has died."""
        await self._dead.wait()
        assert self.dead_error is not None
        return self.dead_error

    def shutdown(self) -> None:
        """End the engine process and the output handler. May be called twice."""
        if self._output_handler is not None:
            self._output_handler.cancel()
            self._output_handler = None
        self.output_processor.propagate_error(EngineDeadError("The engine is shutting down."))
        for listener in self.listeners:
            listener.close()
        self.engine_core.shutdown()
