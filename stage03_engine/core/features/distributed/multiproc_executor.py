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
import socket as sockets
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import zmq

from stage03_engine.args.command import signals_are_ours
from stage03_engine.args.processes import RENDEZVOUS, engine_environment, private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.several_workers import (
    SeveralWorkers,
    all_ranks,
    check_devices,
    lane_of,
    threads_each,
)
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

MODULE = "stage03_engine.core.features.distributed.worker_process"
POLL_MS = 50
TERMINATE_SECONDS = 3.0
LAST_WORDS_SECONDS = 0.5  # from the complaint of a worker until the death is known of the one that it talked to
HELLO_SECONDS = 600.0  # for the processes to import their modules; loading may take any time


def worker_environment(config: VllmConfig, num_workers: int) -> dict[str, str]:
    """Environment of a worker. gloo listens on an address of its own choice unless it is told an interface: here, the one that no
    other machine reaches."""
    threads = threads_each(config, num_workers) or 1
    environment = engine_environment(threads, config.device_config.attention_backend)
    names = [name for _, name in sockets.if_nameindex() if name.startswith("lo")]
    return {"GLOO_SOCKET_IFNAME": names[0], **environment} if names else environment


class WorkerProcesses:
    """The processes of the workers, and the socket to them.

    Invariant: as long as the object is not closed, somebody waits for each process, so that its end is known at once. It knows no
    executor: one that nobody holds any longer can end it (`weakref.finalize`).
    """

    def __init__(self, lanes: list[str], environment: dict[str, str]) -> None:
        self.lanes = lanes
        self._folder = private_folder()
        self.init_method = f"file://{self._folder.path}/{RENDEZVOUS}"
        self._names = [b"worker%d" % rank for rank in range(len(lanes))]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a worker that is gone is an error, not lost
        self._socket.setsockopt(zmq.RCVTIMEO, POLL_MS)
        self._socket.bind(address := f"ipc://{self._folder.path}/workers")
        self._lock = threading.Lock()
        self._closing, self._loaded = False, False
        self._why: str | None = None  # a worker died
        self._died, self._killed = threading.Event(), threading.Event()
        self._report: Callable[[str], None] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            with signals_are_ours():
                for rank, lane in enumerate(lanes):
                    self._spawn([sys.executable, "-m", MODULE, address, str(rank), lane], environment, lane)
        except BaseException:
            self.close()
            raise

    def _spawn(self, command: list[str], environment: dict[str, str], lane: str) -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env=environment)
        self._processes.append(process)
        threading.Thread(target=self._wait_for_end, args=(process, lane), name=f"watch-{lane}", daemon=True).start()
        if trace.on:
            trace.emit("worker.spawned", lane=lane, pid=process.pid)

    def _wait_for_end(self, process: subprocess.Popen[bytes], lane: str) -> None:
        """In a thread per worker. Who was killed counts more than who complains of it and ends."""
        code = process.wait()
        with self._lock:
            if self._closing:
                return
            if self._why is None or code < 0:
                why = " (killed, as a system does that runs out of memory)" if code == -signal.SIGKILL else ""
                self._why = f"{lane} ended unexpectedly with exit code {code}{why}"
            report, first = self._report, not self._died.is_set()
            self._died.set()
            if code < 0:
                self._killed.set()
        if trace.on:
            trace.emit("worker.dead", lane=lane, exit_code=code)
        if report is not None and first:
            report(self._why)

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

    def start(self, config: VllmConfig) -> list[int]:
        """The handshake with every worker: hello -> init -> loaded. Returns the bytes of a KV-cache block of each.

        Raises what a worker raised while it loaded its weights, WorkerDiedError, and StagesError for one that says nothing.
        """
        missing = set(range(len(self.lanes)))
        loaded: dict[int, int] = {}
        asked = config.parallel_config.distributed_timeout_seconds
        deadline = time.monotonic() + (asked or HELLO_SECONDS)
        while len(loaded) < len(self.lanes):
            try:
                rank, _, frames = self.receive(deadline - time.monotonic() if missing else math.inf)
            except TimeoutError:
                names = ", ".join(self.lanes[rank] for rank in sorted(missing))
                flag = " (--distributed-timeout-seconds)" if asked else ""
                raise StagesError(f"{names} did not come within {asked or HELLO_SECONDS:.0f} s{flag}") from None
            message = decode_answer(frames[0])
            if isinstance(message, WorkerHello):
                self._answer_hello(config, rank, message)
                missing.discard(rank)
            else:
                loaded[rank] = message.value
        self._loaded = True
        return [loaded[rank] for rank in range(len(self.lanes))]

    def _answer_hello(self, config: VllmConfig, rank: int, hello: WorkerHello) -> None:
        threads = threads_each(config, len(self.lanes))
        init = WorkerInit(config, rank, rank, threads, self.init_method, trace.run_id)
        if trace.on:
            offset = time.monotonic_ns() - hello.monotonic_ns
            init.cause = trace.emit("worker.init_sent", cause=hello.cause, rank=rank, clock_offset_ns=offset)
        self.send([CALL, encode(init)], [rank])

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
        self._reap(TERMINATE_SECONDS if healthy else 0.0)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        self._reap(1.0)
        for process in self._processes:
            process.kill()
            process.wait()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.remove()

    def _reap(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


class MultiprocExecutor(SeveralWorkers):
    """A worker process per rank, on this machine."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        every = all_ranks(config)
        check_devices(config, len(every))
        self._output_rank = next(each.rank for each in every if each.is_last_stage)
        self.workers = WorkerProcesses([lane_of(each) for each in every], worker_environment(config, len(every)))
        self._end = weakref.finalize(self, self.workers.close)  # also when nobody holds the executor any longer
        self._in_flight: deque[int] = deque()  # numbers of steps
        if trace.on:
            trace.emit("executor.created", kind="MultiprocExecutor")
        try:
            self.block_bytes = self.workers.start(config)
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
