"""An API server as its launcher sees it: a process, and a socket to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from stage02_server.features.api_servers.this_server import Start
from stage03_engine.args.command import signals_are_ours
from stage03_engine.frontend.features.shared_engine import AreYouAlive, Order, Report, decode_report, encode
from stagetrace import trace


class ApiServerProcess:
    """One API server. It ends when this process ends, even by kill -9, because the socket between them closes then."""

    def __init__(self, start: Start) -> None:
        self.name, self.start = start.name, start
        self.failed: str | None = None  # what it reported before it ended
        self.unanswered = 0  # questions since its last answer
        self.is_ready = False  # it has answered
        self._link, theirs = socket.socketpair()
        command = [sys.executable, "-m", "stage02_server.features.api_servers", str(start.index)]
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": start.folder}
        with theirs, signals_are_ours():
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), pass_fds=[start.descriptor], env=environment
            )
        if trace.on:
            start.cause = trace.emit("api_server.spawned", index=start.index, pid=self.process.pid)
        self._send(msgspec.json.encode(start))

    def tell(self, order: Order) -> None:
        """Send an order. If the server is gone, the order is dropped."""
        self._send(encode(order))

    def ask(self) -> None:
        """Ask its event loop for a sign of life. The first one comes unasked, when it is ready."""
        self.unanswered += 1
        self.tell(AreYouAlive())

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self._link.sendall(line + b"\n")

    def follow(self, on_report: Callable[[Report], None], on_exit: Callable[[int], None]) -> None:
        """From a thread, call `on_report` with each report, and `on_exit` with the exit code when the process has ended."""

        def run() -> None:
            with contextlib.suppress(OSError), self._link.makefile("rb") as lines:
                for line in lines:
                    on_report(decode_report(line))
            on_exit(self.process.wait())

        threading.Thread(target=run, name=self.name, daemon=True).start()

    def forget(self, folder: str) -> None:
        """It has ended: close the socket, and remove its gauges from the metrics in `folder`. What it has counted stays."""
        self._link.close()
        mark_process_dead(self.process.pid, folder)

    def kill(self) -> None:
        """End the process if it has not ended, and reap it. May be called twice."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._link.close()
