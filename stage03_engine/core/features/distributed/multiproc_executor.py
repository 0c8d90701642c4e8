"""`--distributed-executor-backend mp`: a process per worker (vllm/v1/executor/multiproc_executor.py, MultiprocExecutor).

    EngineCore -> MultiprocExecutor ─┬─> Worker_TP0 -> Worker -> ModelRunner   (the output rank: it answers)
                                     └─> Worker_TP1 -> Worker -> ModelRunner

A step sends the same bytes to all workers and waits for the output rank, while it listens to all: another one may report why it cannot go on.
worker_links.py has the sockets.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from stage03_engine.args.processes import RENDEZVOUS, exit_reason, private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.several_workers import SeveralWorkers, check_devices, threads_each
from stage03_engine.core.features.distributed.spawned_workers import SpawnedWorkers, loopback, worker_environment
from stage03_engine.core.features.distributed.worker_links import Message, WorkerLinks, WorkerPipes
from stage03_engine.core.features.distributed.worker_messages import (
    CALL,
    FAILED,
    SHUTDOWN,
    STEP,
    WorkerCall,
    WorkerDiedError,
    WorkerHello,
    WorkerInit,
    decode_answer,
    decode_failed,
    encode,
    error_of,
)
from stage03_engine.errors import StagesError
from stagetrace import trace

POLL_MS = 50
TERMINATE_SECONDS = 3.0
HELLO_SECONDS = 600.0  # for the processes to import their modules; loading may take any time


class WorkerProcesses:
    """The processes of the workers, and the links to them.

    Invariant: until the object is closed, a thread waits for each process, so that its end is known at once. The object knows no
    executor, so an executor that is no longer used can end it (`weakref.finalize`).
    """

    LAST_WORDS_SECONDS = 0.5
    """From a worker's error until the death of the worker that caused it is known."""

    def __init__(self, config: VllmConfig, lanes: list[str]) -> None:
        self.config, self.lanes = config, lanes
        self._folder = private_folder()
        self._lock = threading.Lock()
        self._closing, self._loaded = False, False
        self._why: str | None = None  # a worker died
        self._died, self._killed = threading.Event(), threading.Event()
        self._report: Callable[[str], None] | None = None
        self._spawned = SpawnedWorkers(self._ended)
        self._links: WorkerLinks
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Start the processes with a link to each."""
        self._links = pipes = WorkerPipes()
        environment = self._environment(loopback())
        for rank, lane in enumerate(self.lanes):
            with pipes.add() as theirs:
                how = f"pipe:{theirs.fileno()}:{self._folder.path}"
                self._spawned.start(rank, lane, environment, how, (theirs.fileno(),))

    def _environment(self, interface: str | None) -> dict[str, str]:
        """The environment of this machine's workers."""
        threads = threads_each(self.config, self.config.parallel_config.local_world_size) or 1
        return worker_environment(threads, self.config.device_config.attention_backend, interface)

    def _ended(self, lane: str, code: int) -> None:
        """From any thread: a process has ended."""
        killed = code < 0 and code != -signal.SIGABRT  # a worker whose neighbour has died may abort while it ends
        matters = self._fail(f"{lane} ended unexpectedly with {exit_reason(code)}", killed=killed)
        if trace.on and matters:
            trace.emit("worker.dead", lane=lane, exit_code=code)

    def _fail(self, why: str, killed: bool) -> bool:
        """From any thread; False if it no longer matters. A worker that was killed counts more than one that ends because of it."""
        with self._lock:
            if self._closing:
                return False
            if self._why is None or killed:
                self._why = why
            report, first = self._report, not self._died.is_set()
            self._died.set()
            if killed:
                self._killed.set()
        if report is not None and first:
            report(self._why)
        return True

    def on_failure(self, report: Callable[[str], None]) -> None:
        """See Executor."""
        with self._lock:
            self._report, why = report, self._why
        if why is not None:
            report(why)

    def send(self, kind: bytes, payload: bytes, cause: bytes = b"", ranks: Sequence[int] | None = None) -> None:
        """To these workers, or to all. Raises WorkerDiedError."""
        try:
            for rank in range(len(self.lanes)) if ranks is None else ranks:
                self._links.send(rank, (kind, payload, cause))
        except OSError as error:
            self._died.wait(TERMINATE_SECONDS)
            raise WorkerDiedError(self._why or f"the workers cannot be reached: {error}") from error

    def receive(self, limit: float = math.inf) -> tuple[int, Message]:
        """(rank, message), the next one. Raises what a worker reports, WorkerDiedError, and TimeoutError after `limit` seconds."""
        deadline = time.monotonic() + limit
        while True:
            received = self._links.receive(POLL_MS)
            if received is None and self._died.is_set():
                received = self._links.receive(POLL_MS)  # its last words
                if received is None:
                    raise WorkerDiedError(self._why)
            if received is not None:
                rank, (kind, payload, _) = received
                if kind == FAILED:
                    self._raise(rank, payload)
                return received
            if time.monotonic() > deadline:
                raise TimeoutError

    def _raise(self, rank: int, payload: bytes) -> None:
        """Workers that waited for one that was killed report errors too: then the kill is the reason."""
        error = error_of(decode_failed(payload), self.lanes[rank])
        if len(self.lanes) > 1 and not isinstance(error, StagesError) and self._killed.wait(self.LAST_WORDS_SECONDS):
            raise WorkerDiedError(self._why) from error
        raise error

    def start(self) -> list[int]:
        """The handshake with every worker: hello -> init -> loaded. Returns the bytes of a KV-cache block of each.

        Raises what a worker raised while it loaded its weights, WorkerDiedError, and StagesError for one that says nothing.
        """
        hellos = self._hellos()
        for rank, (hello, offset_ns) in hellos.items():
            self._answer_hello(rank, hello, offset_ns)
        loaded: dict[int, int] = {}
        while len(loaded) < len(self.lanes):
            rank, (_, payload, _) = self.receive()
            message = decode_answer(payload)
            assert not isinstance(message, WorkerHello)
            loaded[rank] = message.value
        self._loaded = True
        return [loaded[rank] for rank in range(len(self.lanes))]

    def _hellos(self) -> dict[int, tuple[WorkerHello, int]]:
        """Of each rank: its hello, and how far our clock is ahead of its (ns). No worker is answered before all are there: once
        answered, they wait for each other."""
        hellos: dict[int, tuple[WorkerHello, int]] = {}
        asked = self.config.parallel_config.distributed_timeout_seconds
        deadline = time.monotonic() + (asked or HELLO_SECONDS)
        while len(hellos) < len(self.lanes):
            try:
                rank, (_, payload, _) = self.receive(deadline - time.monotonic())
            except TimeoutError:
                flag = " (--distributed-timeout-seconds)" if asked else ""
                missing = self._missing([rank for rank in range(len(self.lanes)) if rank not in hellos])
                raise StagesError(f"{missing} did not come within {asked or HELLO_SECONDS:.0f} s{flag}") from None
            hello = decode_answer(payload)
            assert isinstance(hello, WorkerHello)
            hellos[rank] = hello, time.monotonic_ns() - hello.monotonic_ns
        return hellos

    def _missing(self, ranks: list[int]) -> str:
        """The names of workers that did not come."""
        return ", ".join(self.lanes[rank] for rank in ranks)

    def _answer_hello(self, rank: int, hello: WorkerHello, offset_ns: int) -> None:
        init = self._init_of(rank)
        if trace.on:
            init.cause = trace.emit("worker.init_sent", cause=hello.cause, rank=rank, clock_offset_ns=offset_ns)
        self.send(CALL, encode(init), ranks=[rank])

    def _init_of(self, rank: int) -> WorkerInit:
        """What the worker has to know."""
        threads = threads_each(self.config, len(self.lanes))
        meeting = f"file://{self._folder.path}/{RENDEZVOUS}"
        return WorkerInit(self.config, rank, rank, threads, meeting, trace.run_id)

    def close(self) -> None:
        """End the processes, reap them, and remove the socket. May be called twice.

        Healthy workers end when asked. Others may be waiting for a dead one: they end when their pipe closes.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        healthy = self._loaded and not self._died.is_set()
        if healthy:
            with contextlib.suppress(WorkerDiedError):
                self.send(CALL, encode(WorkerCall(SHUTDOWN)))
        self._spawned.reap_all(TERMINATE_SECONDS if healthy else 0.0)
        self._release()
        self._folder.remove()

    def _release(self) -> None:
        """Close what was opened; `_open` may have failed half-way."""
        if hasattr(self, "_links"):
            self._links.close()


class MultiprocExecutor(SeveralWorkers):
    """A worker process per rank, on this machine."""

    processes: type[WorkerProcesses] = WorkerProcesses

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        check_devices(config, config.parallel_config.local_world_size)
        self.workers = self.processes(config, self.lanes)
        self._end = weakref.finalize(self, self.workers.close)  # also when the executor is dropped without a shutdown
        if trace.on:
            trace.emit("executor.created", kind="MultiprocExecutor")
        try:
            self.block_bytes = self.workers.start()
        except BaseException:
            self.shutdown()
            raise

    def call_all(self, method: str, argument: int | None = None) -> list[int]:
        self.workers.send(CALL, encode(WorkerCall(method, argument)))
        results: dict[int, int] = {}
        while len(results) < len(self.lanes):
            rank, (_, payload, _) = self.workers.receive()
            answer = decode_answer(payload)
            assert not isinstance(answer, WorkerHello)
            results[rank] = answer.value
        return [results[rank] for rank in range(len(self.lanes))]

    def send_step(self, payload: bytes, cause: bytes) -> None:
        self.workers.send(STEP, payload, cause)

    def receive_step(self, sent: None) -> tuple[bytes, bytes]:
        rank, (kind, payload, cause) = self.workers.receive()
        assert kind == STEP and rank == self._output_rank
        return payload, cause

    def on_failure(self, report: Callable[[str], None]) -> None:
        self.workers.on_failure(report)

    def shutdown(self) -> None:
        self._end()
