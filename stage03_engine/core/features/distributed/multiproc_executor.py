"""`--distributed-executor-backend mp`: a process per worker (vllm/v1/executor/multiproc_executor.py, MultiprocExecutor).

    EngineCore -> MultiprocExecutor  ROUTER ─┬─> DEALER  Worker_TP0 -> Worker -> ModelRunner   (the output rank: it answers)
                                             └─> DEALER  Worker_TP1 -> Worker -> ModelRunner

One ROUTER is enough for everything: it addresses each worker by name for the handshake, sends the same bytes to all of them in a step, and
receives every answer, so that there is one place to wait. PUSH and PULL would need a socket per worker for the same.
vLLM writes into a ring buffer in shared memory, on which the workers spin; a socket sleeps, which on few cores is faster.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import zmq

from stage03_engine.args.processes import RENDEZVOUS, private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.several_workers import (
    SeveralWorkers,
    all_ranks,
    check_devices,
    lane_of,
    threads_each,
)
from stage03_engine.core.features.distributed.spawned_workers import SpawnedWorkers, loopback, worker_environment
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
    decode_output,
    encode,
    error_of,
)
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import StagesError
from stagetrace import trace

POLL_MS = 50
TERMINATE_SECONDS = 3.0
LAST_WORDS_SECONDS = 0.5  # from the complaint of a worker until the death is known of the one that it talked to
HELLO_SECONDS = 600.0  # for the processes to import their modules; loading may take any time


class WorkerProcesses:
    """The processes of the workers, and the socket to them.

    Invariant: as long as the object is not closed, somebody waits for each process, so that its end is known at once. It knows no
    executor: one that nobody holds any longer can end it (`weakref.finalize`).
    """

    def __init__(self, config: VllmConfig, lanes: list[str]) -> None:
        self.config, self.lanes = config, lanes
        self._folder = private_folder()
        self._context = zmq.Context()
        self._names = [b"worker%d" % rank for rank in range(len(lanes))]
        self._lock = threading.Lock()
        self._closing, self._loaded = False, False
        self._why: str | None = None  # a worker died
        self._died, self._killed = threading.Event(), threading.Event()
        self._report: Callable[[str], None] | None = None
        self._spawned = SpawnedWorkers(self._ended)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Bind the socket, and start the processes."""
        self._socket = self._context.socket(zmq.ROUTER)
        self._set_up_socket()
        self._socket.bind(address := f"ipc://{self._folder.path}/workers")
        self._spawn(range(len(self.lanes)), address, loopback())

    def _set_up_socket(self) -> None:
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a worker that is gone is an error, not lost
        self._socket.setsockopt(zmq.RCVTIMEO, POLL_MS)

    def _spawn(self, ranks: range, address: str, interface: str | None) -> None:
        environment = self._environment(threads_each(self.config, len(ranks)) or 1, interface)
        self._spawned.start({rank: self.lanes[rank] for rank in ranks}, address, environment)

    def _environment(self, threads: int, interface: str | None) -> dict[str, str]:
        return worker_environment(threads, self.config.device_config.attention_backend, interface)

    def _ended(self, lane: str, code: int) -> None:
        """From any thread: a process has ended."""
        why = " (killed, as a system does that runs out of memory)" if code == -signal.SIGKILL else ""
        if self._fail(f"{lane} ended unexpectedly with exit code {code}{why}", killed=code < 0) and trace.on:
            trace.emit("worker.dead", lane=lane, exit_code=code)

    def _fail(self, why: str, killed: bool) -> bool:
        """From any thread; False if it does not matter any longer. Who was killed counts more than who complains of it and ends."""
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

    def send(self, frames: list[bytes], ranks: list[int] | None = None) -> None:
        """To these workers, or to all. Raises WorkerDiedError."""
        try:
            for rank in range(len(self._names)) if ranks is None else ranks:
                self._socket.send_multipart([self._names[rank], *frames])
        except zmq.ZMQError as error:
            self._died.wait(TERMINATE_SECONDS)
            raise WorkerDiedError(self._why or f"the workers cannot be reached: {error}") from error

    def receive(self, limit: float = math.inf) -> tuple[int, bytes, list[bytes]]:
        """(rank, kind, frames) of the next message. Raises what a worker reports, WorkerDiedError, and TimeoutError after `limit`
        seconds."""
        deadline = time.monotonic() + limit
        while True:
            try:
                name, kind, *frames = self._socket.recv_multipart()
            except zmq.Again:  # nothing for a while
                if self._died.is_set() and not self._socket.poll(POLL_MS):
                    raise WorkerDiedError(self._why) from None
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                continue
            rank = int(name.removeprefix(b"worker"))
            if kind == FAILED:
                self._raise(rank, frames[0])
            return rank, kind, frames

    def _raise(self, rank: int, payload: bytes) -> None:
        """Workers that wait for each other complain of the one that is killed: then the killing is the reason."""
        error = error_of(decode_failed(payload), self.lanes[rank])
        if len(self.lanes) > 1 and not isinstance(error, StagesError) and self._killed.wait(LAST_WORDS_SECONDS):
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
            rank, _, frames = self.receive()
            message = decode_answer(frames[0])
            assert not isinstance(message, WorkerHello)
            loaded[rank] = message.value
        self._loaded = True
        return [loaded[rank] for rank in range(len(self.lanes))]

    def _hellos(self) -> dict[int, tuple[WorkerHello, int]]:
        """Of each rank: its hello, and how far our clock is ahead of its (ns). Nobody is answered before all are there: from then on
        workers wait for each other."""
        hellos: dict[int, tuple[WorkerHello, int]] = {}
        asked = self.config.parallel_config.distributed_timeout_seconds
        deadline = time.monotonic() + (asked or HELLO_SECONDS)
        while len(hellos) < len(self.lanes):
            try:
                rank, _, frames = self.receive(deadline - time.monotonic())
            except TimeoutError:
                flag = " (--distributed-timeout-seconds)" if asked else ""
                missing = self._missing([rank for rank in range(len(self.lanes)) if rank not in hellos])
                raise StagesError(f"{missing} did not come within {asked or HELLO_SECONDS:.0f} s{flag}") from None
            hello = decode_answer(frames[0])
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
        self.send([CALL, encode(init)], [rank])

    def _init_of(self, rank: int) -> WorkerInit:
        """What the worker has to know."""
        threads = threads_each(self.config, len(self.lanes))
        meeting = f"file://{self._folder.path}/{RENDEZVOUS}"
        return WorkerInit(self.config, rank, rank, threads, meeting, trace.run_id)

    def close(self) -> None:
        """End the processes, reap them, and remove the socket. May be called twice.

        Healthy workers end by themselves once they are asked. Any other may wait for one that is dead: those end with their pipe.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        healthy = self._loaded and not self._died.is_set()
        if healthy:
            with contextlib.suppress(WorkerDiedError):
                self.send([CALL, encode(WorkerCall(SHUTDOWN))])
        self._spawned.reap_all(TERMINATE_SECONDS if healthy else 0.0)
        self._release()
        self._folder.remove()

    def _release(self) -> None:
        """Close what was opened; `_open` may have failed half-way."""
        self._context.destroy(linger=0)


class MultiprocExecutor(SeveralWorkers):
    """A worker process per rank, on this machine."""

    processes: type[WorkerProcesses] = WorkerProcesses

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        every = all_ranks(config)
        check_devices(config, config.parallel_config.local_world_size)
        self._output_rank = next(each.rank for each in every if each.is_last_stage)
        self.workers = self.processes(config, [lane_of(each) for each in every])
        self._end = weakref.finalize(self, self.workers.close)  # also when nobody holds the executor any longer
        self._in_flight: deque[int] = deque()  # numbers of steps
        if trace.on:
            trace.emit("executor.created", kind="MultiprocExecutor")
        try:
            self.block_bytes = self.workers.start()
        except BaseException:
            self.shutdown()
            raise

    def call_all(self, method: str, argument: int | None = None) -> list[int]:
        self.workers.send([CALL, encode(WorkerCall(method, argument))])
        results: dict[int, int] = {}
        while len(results) < len(self.block_bytes):
            rank, _, frames = self.workers.receive()
            answer = decode_answer(frames[0])
            assert not isinstance(answer, WorkerHello)
            results[rank] = answer.value
        return [results[rank] for rank in range(len(self.block_bytes))]

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        payload = encode(scheduler_output)
        sent = None
        if trace.on:
            size, count = len(payload), len(self.block_bytes)
            sent = trace.emit("executor.step_sent", step=scheduler_output.step, bytes=size, workers=count)
        self.workers.send([STEP, payload, (sent or "").encode()])
        self._in_flight.append(scheduler_output.step)

    def finish_step(self) -> ModelRunnerOutput:
        rank, kind, (payload, cause) = self.workers.receive()
        assert kind == STEP and rank == self._output_rank
        step = self._in_flight.popleft()
        if trace.on:
            trace.emit("executor.output_received", step=step, cause=cause.decode() or None, bytes=len(payload))
        return decode_output(payload)

    def on_failure(self, report: Callable[[str], None]) -> None:
        self.workers.on_failure(report)

    def shutdown(self) -> None:
        self._end()
