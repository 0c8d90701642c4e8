"""The process that tells every front end how busy each engine is (vllm/v1/engine/coordinator.py, DPCoordinator).

A single front end needs no coordinator: the counts come with the outputs, and it alone sends requests. Of several, each sees only
what it sent itself. So each pushes the counts that an engine gave it (PUSH -> PULL), and the coordinator publishes the newest
of all engines (PUB -> SUB), ten times a second at most. The sockets lie in a private folder; messages are msgpack.

The process that starts the front ends starts this one too. It reads its configuration from its standard input, and ends when that
closes, which happens even after kill -9. If it dies it is started again, on the same sockets. While it is gone, each front end goes on with what
it knows: what it sends itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from stage03_engine.args.log import enter_process
from stage03_engine.args.processes import (
    end_process,
    end_with_parent,
    exit_reason,
    private_folder,
    start_process,
    wake_as_orphan,
)
from stage03_engine.config import VllmConfig
from stage03_engine.frontend.engine_process import TERMINATE_SECONDS
from stage03_engine.frontend.features.data_parallel.restart import RestartLimit
from stage03_engine.messages import MALFORMED
from stage03_engine.tracing import open_trace
from stagetrace import trace

logger = logging.getLogger(__name__)
PUBLISH_SECONDS = 0.1  # from one publication to the next, at least
MOST_RESTARTS = 3  # within ten minutes
NAME = "DPCoordinator"


class EngineCounts(msgspec.Struct, array_like=True, gc=False):
    """The state of one engine's scheduler after a step, with the requests of all front ends."""

    engine_index: int
    waiting: int
    running: int
    cause: str | None = None


class AllCounts(msgspec.Struct, array_like=True, gc=False):
    """The newest counts of each engine."""

    engines: list[EngineCounts]
    cause: str | None = None


class _Init(msgspec.Struct):
    """The line of JSON that the process reads first."""

    config: VllmConfig
    run_id: str  # of the trace


_encode = msgspec.msgpack.Encoder().encode
_decode_counts = msgspec.msgpack.Decoder(EngineCounts).decode
_decode_all = msgspec.msgpack.Decoder(AllCounts).decode


def report_address(folder: Path) -> str:
    """Where front ends push the counts that they have from engines."""
    return f"ipc://{folder}/counts"


def publish_address(folder: Path) -> str:
    """Where the coordinator publishes the counts of all engines."""
    return f"ipc://{folder}/published"


class DPCoordinator:
    """The coordinator, as the process sees it that starts the front ends and tells them its `folder`.

    Invariant: until `shutdown`, a thread waits for the end of the process, and starts it again at most MOST_RESTARTS times within ten minutes.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._folder = private_folder()
        self.folder = self._folder.path
        self._init = msgspec.json.encode(_Init(config, trace.run_id)) + b"\n"
        self._limit, self._lock, self._is_closing = RestartLimit(MOST_RESTARTS), threading.Lock(), False
        self._start()

    def _start(self) -> None:
        self._process = start_process(__name__, str(self.folder))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.write(self._init)
        threading.Thread(target=self._wait, args=(self._process,), name="coordinator-monitor", daemon=True).start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread: wait for the end of the process, and start it again."""
        code = process.wait()
        with self._lock:
            if self._is_closing:
                return
            assert process.stdin is not None
            process.stdin.close()
            may = self._limit.take()
            then = (
                "it is started again"
                if may
                else "it is not started again, and each API server goes by what it sends itself"
            )
            logger.error("%s ended unexpectedly (%s); %s.", NAME, exit_reason(code), then)
            if may:
                self._start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def shutdown(self) -> None:
        """End the process, reap it, and remove the sockets. May be called twice."""
        with self._lock:
            self._is_closing = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        end_process(self._process, TERMINATE_SECONDS)
        self._folder.remove()


class CountsLink:
    """A front end's sockets to the coordinator. Lost messages do no harm: they are repeated, or the next ones say more."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._push, self._sub = self._context.socket(zmq.PUSH), self._context.socket(zmq.SUB)
        self._push.connect(report_address(folder))
        self._sub.connect(publish_address(folder))
        self._sub.subscribe(b"")
        self._last: dict[int, tuple[int, int]] = {}
        self._stop_reading: Callable[[], object] = lambda: None

    def start(self, on_counts: Callable[[list[EngineCounts]], None]) -> None:
        """Call `on_counts` on this event loop whenever counts are published."""
        loop, descriptor = asyncio.get_running_loop(), int(self._sub.FD)
        loop.add_reader(descriptor, self._read, on_counts)
        self._stop_reading = lambda: loop.remove_reader(descriptor)
        self._read(on_counts)

    def _read(self, on_counts: Callable[[list[EngineCounts]], None]) -> None:
        while self._sub.poll(0):
            published = _decode_all(self._sub.recv())
            if trace.on:
                trace.emit("dp.counts_received", cause=published.cause, engines=len(published.engines))
            on_counts(published.engines)
            self._repeat_without(published.engines)

    def _repeat_without(self, published: list[EngineCounts]) -> None:
        """Report again what the coordinator does not know: it was started again, and missed what was sent meanwhile."""
        for index in self._last.keys() - {each.engine_index for each in published}:
            waiting, running = self._last.pop(index)
            self.report(EngineCounts(index, waiting, running))

    def report(self, counts: EngineCounts) -> None:
        """Pass on an engine's counts, if they have changed."""
        said = counts.waiting, counts.running
        if self._last.get(counts.engine_index) == said:
            return
        self._last[counts.engine_index] = said
        if trace.on:
            counts.cause = trace.emit(
                "dp.counts_sent", engine=counts.engine_index, waiting=counts.waiting, running=counts.running
            )
        with contextlib.suppress(zmq.Again):
            self._push.send(_encode(counts), zmq.NOBLOCK)

    def close(self) -> None:
        """May be called twice."""
        self._stop_reading()
        self._stop_reading = lambda: None
        self._context.destroy(linger=0)


class _Gatherer:
    """The counts and the two sockets of the process."""

    def __init__(self, folder: Path) -> None:
        context = zmq.Context()
        self._pull, self._publisher = context.socket(zmq.PULL), context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.XPUB_VERBOSE, 1)  # each front end that comes is told what is known
        self._publisher.bind(publish_address(folder))
        self._pull.bind(report_address(folder))
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self._publisher, zmq.POLLIN)
        self._counts: dict[int, EngineCounts] = {}
        self._news, self._next = False, 0.0

    def run(self) -> None:
        """Gather and publish forever."""
        while True:
            left = max(0.0, self._next - time.monotonic()) if self._news else None
            for socket, _ in self._poller.poll(None if left is None else math.ceil(left * 1000)):
                self._receive() if socket is self._pull else self._welcome()
            if self._news and time.monotonic() >= self._next:
                self._publish()

    def _receive(self) -> None:
        try:
            counts = _decode_counts(self._pull.recv())
        except MALFORMED:
            return  # a malformed message must not end the process
        self._counts.pop(counts.engine_index, None)  # the newest is last
        self._counts[counts.engine_index], self._news = counts, True

    def _welcome(self) -> None:
        """Tell a new front end what is known; if that is nothing, it reports what it knows itself."""
        if self._publisher.recv()[:1] == b"\x01":  # it subscribes; 0 says that one has left
            self._news, self._next = True, 0.0

    def _publish(self) -> None:
        message = AllCounts([counts for _, counts in sorted(self._counts.items())])
        if trace.on:
            latest = next((each.cause for each in reversed(self._counts.values()) if each.cause), None)
            message.cause = trace.emit("dp.counts_published", cause=latest, engines=len(message.engines))
            trace.flush()
        self._publisher.send(_encode(message))
        self._news, self._next = False, time.monotonic() + PUBLISH_SECONDS


def main(folder: Path) -> None:
    """Main function of the process."""
    wake_as_orphan()
    trace.hold(NAME)
    if not (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        return  # the parent is gone already
    init = msgspec.json.decode(line, type=_Init)
    end_with_parent(folder)
    open_trace(init.config, run_id=init.run_id)
    enter_process(NAME, init.config)
    _Gatherer(folder).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
