"""Several engines behind one front end (vllm/v1/engine/core_client.py, DPLBAsyncMPClient).

Each engine is a process with its own scheduler, KV cache, sockets and trace file. `AsyncLLM` uses DPLBAsyncMPClient as it uses
AsyncMPClient. The client sends each request to one engine and passes on the outputs of all. When an engine dies, only its own
requests are hit: those that can run again do so on another engine, and the engine is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zmq

from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, StagesError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient
from stage03_engine.frontend.features.data_parallel.balancing import Balancer, Choice
from stage03_engine.frontend.features.data_parallel.coordinator import CountsLink, EngineCounts
from stage03_engine.frontend.features.data_parallel.engine import (
    DPAsyncMPClient,
    Engine,
    EngineState,
    MakeEngine,
    share_of,
)
from stage03_engine.frontend.features.data_parallel.in_flight import InFlight
from stage03_engine.frontend.features.data_parallel.prefix_index import PrefixIndex
from stage03_engine.frontend.features.data_parallel.restart import NodeLostError, RestartLimit
from stage03_engine.frontend.features.data_parallel.states import states_event
from stage03_engine.frontend.features.data_parallel.totals import Totals
from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineReady, FinishReason, SchedulerStats
from stage03_engine.tracing import trace_message
from stagetrace import trace

logger = logging.getLogger(__name__)
WATCH, UNWATCH = "watch_scheduler", "unwatch_scheduler"
EMPTIES = ("reset_prefix_cache", "sleep", "update_weights")
"""Calls after which an engine's prefix cache is empty."""


class ScalingError(Exception):
    """The number of engines cannot be changed now."""


async def _all_of(work: Iterable[Coroutine[Any, Any, EngineReady]]) -> list[EngineReady]:
    """All results. Waits until all have ended, then raises the first error."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if isinstance(result, EngineReady)]


class DPLBAsyncMPClient(AsyncEngineCoreClient):
    """Balances requests between several engines.

    `make_engine` makes the client of one engine. If there are other front ends, `counts` links this one with the coordinator, which knows
    what the others have sent. Everything happens on the event loop.

    Invariant: an output is passed on only if it comes from the engine that has the request now.
    """

    def __init__(
        self, config: VllmConfig, make_engine: MakeEngine = DPAsyncMPClient, counts: CountsLink | None = None,
        limit: RestartLimit | None = None,
    ) -> None:  # fmt: skip
        settings = config.data_parallel_config
        self._config, self._make_engine = config, make_engine
        self.size: int = len(settings.engine_indices)  # how many engines there should be
        self._engines: dict[int, Engine] = {}
        self._requests: dict[str, InFlight] = {}
        self._held: dict[str, InFlight] = {}  # while no engine is ready
        self._balancer = self._new_balancer()
        self._limit = limit or RestartLimit(settings.data_parallel_restart)
        self._counts = counts
        self._outputs: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        # The seeds that an engine would give to requests without one. A request that runs again must have the same.
        self._seeds = random.Random(config.model_config.seed)
        self._is_scaling = self._is_watched = False
        self.preparing: list[Callable[[AsyncEngineCoreClient], Awaitable[None]]] = []
        """Called for each engine that comes later, before it gets requests: features bring it to where the others are."""
        self.stall_seconds, self.clock = 0.0, time.monotonic  # --engine-stall-seconds: set by the server before `start`
        self.grace_seconds = 0.0
        """From a death until its requests are sent again: engines that die together, as with their machine, must not pass them on to each
        other, for that would look as if the requests had killed them. Set by the server."""
        self._totals = Totals()

    def _new_balancer(self) -> Balancer:
        return Balancer(PrefixIndex.asked(self._config))

    @property
    def states(self) -> dict[int, EngineState]:
        """Number of an engine -> what it is doing."""
        return {index: engine.state for index, engine in sorted(self._engines.items())}

    @property
    def _alive(self) -> list[Engine]:
        return [engine for _, engine in sorted(self._engines.items()) if engine.is_alive]

    @property
    def num_ready(self) -> int:
        """Engines that take requests."""
        return sum(engine.state == EngineState.READY for engine in self._engines.values())

    @property
    def num_gpu_blocks(self) -> dict[int, int]:
        """How many KV-cache blocks each engine has, once it has said so."""
        said = {index: engine.num_gpu_blocks for index, engine in self._engines.items()}
        return {index: num_blocks for index, num_blocks in said.items() if num_blocks is not None}

    @property
    def num_restarts(self) -> int:
        """How often a dead engine has been started again."""
        return self._limit.total

    def start_process(self) -> None:
        indices = self._config.data_parallel_config.engine_indices
        if trace.on:
            trace.emit("client.created", kind="DPLBAsyncMPClient", engine_ranks=list(indices))
        for index in indices:
            self._add(index, self.size, later=False)

    def _add(self, index: int, size: int, later: bool) -> Engine:
        """Start the process of one of `size` engines. Raises OSError, and ConfigError if there is no GPU for it."""
        engine = self._engines[index] = Engine(index, self._make_engine(share_of(self._config, size, later), index))
        engine.client.start_process()
        return engine

    async def start(self) -> EngineReady:
        """Wait until all engines can serve. Raises StagesError for the first one that cannot."""
        engines = list(self._engines.values())
        ready = await asyncio.gather(*(engine.client.start() for engine in engines))
        if self._counts is not None:
            self._counts.start(self._counted_elsewhere)
        for engine, said in zip(engines, ready):
            await self._join(engine, said)
        if self.stall_seconds:
            self._in_background(self._keep_looking_for_stalls())
        return ready[0]

    async def _join(self, engine: Engine, ready: EngineReady) -> None:
        """From now on the engine takes requests, first those that waited for one."""
        engine.owes_since = None
        self._now(engine, EngineState.READY)
        engine.num_gpu_blocks = ready.num_gpu_blocks
        self._balancer.join(engine.index, ready.num_gpu_blocks - 1)
        engine.reader = self._in_background(self._read(engine))
        if self._is_watched:
            self._in_background(self._watch_again(engine))
        if trace.on:
            trace.emit("dp.engine_joined", engine=engine.index, num_ready=self.num_ready)
        while self._held and self.num_ready:
            first = next(iter(self._held))
            await self._send(self._held.pop(first))

    async def _prepare(self, engine: Engine) -> None:
        """If it dies meanwhile, whoever reads its outputs hears of it."""
        with contextlib.suppress(EngineDeadError):
            for prepare in self.preparing:
                await prepare(engine.client)

    def _now(self, engine: Engine, state: EngineState) -> None:
        """What the engine is doing from now on."""
        engine.state = state
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        """Tell those who watch the schedulers what each engine is doing."""
        if self._is_watched:
            event = states_event(self.states)
            self._outputs.put_nowait(EngineCoreOutputs(engine_index=min(self._engines), trace_events=[event]))

    async def _watch_again(self, engine: Engine) -> None:
        with contextlib.suppress(EngineDeadError):
            await engine.client.call(WATCH)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        """A bug in a task must reach the clients that wait, or they would hang."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the client of the engines failed", exc_info=error)
            self._end(EngineDeadError(f"The client of the engines failed: {error!r}"))

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if request.sampling_params.seed is None:
            params = msgspec.structs.replace(request.sampling_params, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, sampling_params=params)
        in_flight = self._requests[request.request_id] = InFlight(request)
        await self._send(in_flight)

    async def _send(self, in_flight: InFlight, again: bool = False) -> None:
        """Send a request to the engine that the balancer chooses, or keep it until one is ready."""
        request_id = in_flight.request.request_id
        choice = self._choose(in_flight.request)
        if choice is None:
            self._held[request_id] = in_flight
            return
        engine, load = self._engines[choice.engine], self._balancer.loads[choice.engine]
        in_flight.choice = choice
        engine.num_requests += 1
        engine.owes_since = self.clock() if engine.owes_since is None else engine.owes_since
        if trace.on:
            trace.emit(
                "dp.routed", req=request_id, engine=engine.index, waiting=load.waiting, running=load.running,
                cached_blocks=choice.cached_blocks, again=again,
            )  # fmt: skip
        with contextlib.suppress(EngineDeadError):  # `_died` will send it to another one
            await engine.client.add_request_async(self._message(in_flight.request, engine))

    def _choose(self, request: EngineCoreRequest) -> Choice | None:
        """Which engine it goes to now; None if none is ready for it."""
        return self._balancer.choose(request)

    def _message(self, request: EngineCoreRequest, engine: Engine) -> EngineCoreRequest:
        """What this engine is asked to do for it."""
        return request

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            in_flight = self._forget(request_id)
            if in_flight is not None and in_flight.engine is not None:
                by_engine.setdefault(in_flight.engine, []).append(request_id)
        for index, ids in by_engine.items():
            if (engine := self._engines.get(index)) is not None and engine.is_alive:
                await self._abort(engine, ids)

    def engine_of(self, request_id: str) -> int | None:
        in_flight = self._requests.get(request_id)
        return None if in_flight is None else in_flight.engine

    async def _abort(self, engine: Engine, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):
            await engine.client.abort_requests_async(request_ids)

    def _forget(self, request_id: str) -> InFlight | None:
        in_flight = self._requests.pop(request_id, None)
        if in_flight is None:
            return None
        self._held.pop(request_id, None)
        if in_flight.choice is not None and in_flight.has_begun:
            self._balancer.ended(in_flight.choice, in_flight.request, in_flight.tokens)
        if in_flight.engine is not None and (engine := self._engines.get(in_flight.engine)) is not None:
            engine.num_requests -= 1
            if engine.num_requests == 0:
                engine.drained.set()
        return in_flight

    async def call(self, method: str, *args: Any) -> Any:
        """True if every engine did something; of other answers the first one: engines are asked the same. Raises EngineDeadError if none is ready, and InvalidRequestError.

        A watcher who comes while no engine is ready sees each engine as soon as it is."""
        if method in (WATCH, UNWATCH):
            self._is_watched = method == WATCH
            self._tell_watchers()
        asked = self._alive
        answers = await asyncio.gather(*(each.client.call(method, *args) for each in asked), return_exceptions=True)
        for engine, answer in zip(asked, answers):
            if method in EMPTIES and answer is True:
                self._balancer.cache_is_empty(engine.index)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
                raise answer
        done = [
            answer for answer in answers if not isinstance(answer, BaseException)
        ]  # who died meanwhile has no answer
        if not done and method not in (WATCH, UNWATCH):
            raise EngineDeadError("No engine is ready.")
        return done[0] if done and not isinstance(done[0], bool) else all(done)

    async def get_output_async(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, Exception):
            self._outputs.put_nowait(item)  # later calls raise it again
            raise item
        return item

    async def _read(self, engine: Engine) -> None:
        """Pass on the engine's outputs until it dies."""
        try:
            while True:
                self._received(engine, await engine.client.get_output_async())
        except EngineDeadError as error:
            await self._died(engine, error)

    def _received(self, engine: Engine, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index, passed = engine.index, []
        for output in outputs.outputs:
            in_flight = self._requests.get(output.request_id)
            if in_flight is None or (choice := in_flight.choice) is None or choice.engine != engine.index:
                continue  # aborted, or on another engine by now
            if output.new_token_ids and not in_flight.has_begun:
                self._balancer.began(choice, output.num_cached_tokens)
            new = in_flight.admit(output)
            if new is not None:
                passed.append(new)
                if new.finish_reason is not None:
                    self._forget(output.request_id)
                if new.finish_reason == FinishReason.ERROR and output.finish_reason is None:
                    self._in_background(self._abort(engine, [output.request_id]))
        engine.owes_since = self.clock() if engine.num_requests else None
        outputs.outputs = passed
        if outputs.scheduler_stats is not None:
            outputs.scheduler_stats = self._counted(engine, outputs.scheduler_stats)
        self._outputs.put_nowait(outputs)

    def _counted(self, engine: Engine, stats: SchedulerStats) -> SchedulerStats:
        """Note how much the engine has to do. Returns its state with all that its predecessors counted."""
        load = self._balancer.loads.get(engine.index)
        if load is not None:
            load.seen(stats.num_waiting, stats.num_running, engine.num_requests)
        if self._counts is not None:
            self._counts.report(EngineCounts(engine.index, stats.num_waiting, stats.num_running))
        return self._totals.add(engine.index, stats)

    def _counted_elsewhere(self, counts: Iterable[EngineCounts]) -> None:
        """Note what the coordinator publishes: counts of the requests of all front ends."""
        for each in counts:
            load, engine = self._balancer.loads.get(each.engine_index), self._engines.get(each.engine_index)
            if load is not None and engine is not None:
                load.seen(each.waiting, each.running, engine.num_requests)

    async def _died(self, engine: Engine, error: EngineDeadError) -> None:
        """Give the engine's requests to others, tell the clients of those that cannot run again, and start it again."""
        was_draining = engine.state == EngineState.DRAINING
        self._now(engine, EngineState.DEAD)
        self._balancer.leave(engine.index)
        if not was_draining and not self._may_start_again(error):
            logger.error(
                "Engine %d: %s It is not started again (--data-parallel-restart %d).",
                engine.index,
                error,
                self._limit.most,
            )
            return self._end(error)
        own = [each for each in self._requests.values() if each.engine == engine.index]
        for each in own:
            each.engine_died()
        again = [each for each in own if each.can_run_again]
        refused = [each for each in own if not each.can_run_again]
        logger.error(
            "Engine %d: %s %d of its requests run again on another engine, %d end with an error because another engine died with them, too.",
            engine.index, error, len(again), len(refused),
        )  # fmt: skip
        if trace.on:
            trace.emit(
                "dp.engine_lost", engine=engine.index, message=trace_message(error), again=len(again), failed=len(refused),
                num_ready=self.num_ready,
            )  # fmt: skip
        for each in refused:
            self._forget(each.request.request_id)
        last, counted = [each.refuse() for each in refused], self._totals.engine_ended(engine.index)
        self._outputs.put_nowait(EngineCoreOutputs(last, counted, engine_index=engine.index))
        engine.num_requests = 0
        engine.drained.set()
        self._in_background(self._send_again(again))
        if not was_draining:
            self._in_background(self._start_again(engine))

    async def _send_again(self, requests: list[InFlight]) -> None:
        await asyncio.sleep(self.grace_seconds)
        for each in requests:
            if self._requests.get(each.request.request_id) is each:  # not aborted meanwhile
                await self._send(each, again=True)

    async def _keep_looking_for_stalls(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(min(1.0, self.stall_seconds / 4))
            if self.clock() - before < self.stall_seconds / 2:  # else this process was halted, and has answers to read
                await self.look_for_stalls()

    async def look_for_stalls(self) -> None:
        """An engine that has owed an answer for `stall_seconds` counts as dead: it is ended and started again. Without restarts it is
        left alone, as it may still go on."""
        now, ends = self.clock(), list[Coroutine[Any, Any, None]]()
        for engine in self._alive if self._limit.most else []:
            if engine.owes_since is not None and now - engine.owes_since > self.stall_seconds:
                assert engine.reader is not None
                engine.reader.cancel()  # whatever it still says is ignored
                engine.client.stands_still()  # type: ignore[attr-defined]
                why = f"It has not answered for {now - engine.owes_since:.1f} s (--engine-stall-seconds)."
                ends.append(self._died(engine, EngineDeadError(why)))
        await asyncio.gather(*ends)  # side by side: none gets the requests of another

    def _may_start_again(self, error: EngineDeadError) -> bool:
        """The engines of a lost machine come back with it. Nothing is started again here, so there is no limit."""
        return (isinstance(error, NodeLostError) and self._limit.most > 0) or self._limit.take()

    async def _start_again(self, engine: Engine) -> None:
        await self._end_engine(engine)
        engine.client = self._make_engine(share_of(self._config, self.size, later=True), engine.index)
        self._now(engine, EngineState.LOADING)
        try:
            engine.client.start_process()
            ready = await engine.client.start()
        except (StagesError, OSError, zmq.ZMQError) as error:  # the disk is full, for instance
            await self._died(engine, EngineDeadError(f"It cannot start again: {error}"))
            return
        logger.info("Engine %d is ready again.", engine.index)
        await self._prepare(engine)
        await self._join(engine, ready)

    async def _end_engine(self, engine: Engine) -> None:
        """End an engine's process, while the event loop goes on, and close its sockets."""
        if engine.reader is not None and engine.reader is not asyncio.current_task():
            engine.reader.cancel()
        if isinstance(engine.client, DPAsyncMPClient):
            await asyncio.to_thread(engine.client.end_process)
        engine.client.shutdown()

    def _end(self, error: EngineDeadError) -> None:
        """End every request with this error, and with it the server."""
        self._outputs.put_nowait(error)

    async def scale(self, size: int) -> None:
        """Change the number of engines: start more, or let the last ones finish their requests and end.

        Raises ScalingError if a change is under way already, an engine is not ready, or the engines are on several machines. Raises StagesError or
        OSError if a new engine cannot start; then there are as many as before.
        """
        settings = self._config.data_parallel_config
        if settings.num_elsewhere or settings.data_parallel_hybrid_lb:
            raise ScalingError(
                "The number of engines on several machines is fixed: start all machines with another --data-parallel-size."
            )
        if self._is_scaling:
            raise ScalingError("The number of engines is being changed already.")
        if self.num_ready < len(self._engines):
            raise ScalingError("An engine is being started again; try again when it is ready.")
        self._is_scaling = True
        try:
            await (self._grow(size) if size > self.size else self._shrink(size))
        finally:
            self._is_scaling = False
        if trace.on:
            trace.emit("dp.scaled", engines=size)
        logger.info("Engines: %d now.", size)

    async def _grow(self, size: int) -> None:
        free = (index for index in itertools.count() if index not in self._engines)
        indices = list(itertools.islice(free, size - self.size))
        try:
            new = [self._add(index, size, later=True) for index in indices]
            self._tell_watchers()
            ready = await _all_of(engine.client.start() for engine in new)
        except BaseException:
            for index in indices:
                if (engine := self._engines.pop(index, None)) is not None:
                    await self._end_engine(engine)
            self._tell_watchers()
            raise
        self.size = size
        for engine, said in zip(new, ready):
            await self._prepare(engine)
            await self._join(engine, said)

    async def _shrink(self, size: int) -> None:
        self.size = size
        leaving = [engine for _, engine in sorted(self._engines.items())][size:]
        for engine in leaving:
            self._now(engine, EngineState.DRAINING)
            engine.drained.clear()
            self._balancer.leave(engine.index)
        for engine in leaving:
            if engine.num_requests:
                await engine.drained.wait()
            await self._end_engine(engine)
            self._totals.engine_ended(engine.index)
            del self._engines[engine.index]
            self._tell_watchers()

    def shutdown(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._counts is not None:
            self._counts.close()
        clients = [engine.client for engine in self._engines.values()]
        own = [client for client in clients if isinstance(client, DPAsyncMPClient)]
        if own:
            with ThreadPoolExecutor(len(own)) as threads:  # they end side by side
                list(threads.map(DPAsyncMPClient.end_process, own))
        for client in clients:
            client.shutdown()
