"""The worker processes of one machine: started, watched, reaped. Knows no socket and imports no torch."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from stage03_engine.args.processes import engine_environment, start_process
from stage03_engine.core.features.distributed.fork_server import ForkedWorker, ForkServer, is_asked_for
from stagetrace import trace

MODULE = "stage03_engine.core.features.distributed.worker_process"


def worker_environment(threads: int, attention_backend: str, interface: str | None) -> dict[str, str]:
    """Environment of a worker. gloo uses the network `interface`, or chooses one itself if it is None. What the user has set stays."""
    environment = engine_environment(threads, attention_backend)
    return environment if interface is None else {"GLOO_SOCKET_IFNAME": interface, **environment}


def loopback() -> str | None:
    """The network interface that no other machine reaches."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


class SpawnedWorkers:
    """Invariant: until `reap_all`, a thread waits for each process, so that its end is known at once: `ended(lane, exit code)`."""

    def __init__(self, ended: Callable[[str, int], None]) -> None:
        self._ended = ended
        self._processes: list[subprocess.Popen[bytes] | ForkedWorker] = []
        self._fork_server: ForkServer | None = None

    def start(
        self, rank: int, lane: str, environment: dict[str, str], how: str, inherited: tuple[int, ...] = ()
    ) -> None:
        """Start the process of one rank. `how` is its way to the executor (see worker_process.py), `inherited` the descriptors that it gets."""
        process: subprocess.Popen[bytes] | ForkedWorker
        if is_asked_for():
            if self._fork_server is None:
                self._fork_server = ForkServer(environment)
            process = self._fork_server.start(how, rank, lane, inherited)
        else:
            process = start_process(MODULE, how, str(rank), lane, environment=environment, inherited=inherited)
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(process, lane), name=f"watch-{lane}", daemon=True).start()
        if trace.on:
            trace.emit("worker.spawned", lane=lane, pid=process.pid)

    def _watch(self, process: subprocess.Popen[bytes] | ForkedWorker, lane: str) -> None:
        self._ended(lane, process.wait())

    def reap_all(self, patience: float) -> None:
        """Wait `patience` seconds for processes that were asked to end; then close their pipes, and kill what is left."""
        self._reap(patience)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        self._reap(1.0)
        for process in self._processes:
            process.kill()
        self._reap(1.0)
        if self._fork_server is not None:  # one that was stopped reports no end until it is killed
            self._fork_server.close()
        for process in self._processes:
            process.wait()

    def _reap(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
