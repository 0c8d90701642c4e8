"""`VLLM_WORKER_MULTIPROC_METHOD=forkserver`: workers are forked from a process that has imported torch, and done nothing else.

    executor ── socket: how, rank, lane, descriptors ──> fork server ── fork ──> worker
        <── pipe of each worker: its pid, and at the end its exit code ──┘

`import torch` takes seconds and memory: here one process spends them for all workers of an engine on this machine. It has one thread, so no lock can be
held by a thread that a fork leaves behind. A worker differs from one that was started by itself in its parent alone. (vLLM uses Python's multiprocessing.forkserver, which
imports the user's main module again, and pickles.)
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import NoReturn

from stage03_engine.args.processes import end_process, start_process, wake_as_orphan
from stage03_engine.errors import StagesError

MODULE = "stage03_engine.core.features.distributed.fork_server"
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
PIPE = "pipe:"  # as in worker_process.py
NUMBER = struct.Struct("<i")
MOST_BYTES, MOST_DESCRIPTORS = 65536, 8
END_SECONDS = 1.0
START_SECONDS = 600.0  # for the fork server to import torch


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Are workers to be forked?"""
    return environ.get(METHOD, "").strip() == "forkserver"


class ForkServer:
    """The executor's side."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with theirs:
            number = theirs.fileno()
            self._process = start_process(MODULE, str(number), environment=environment, inherited=(number,))

    def start(self, how: str, rank: int, lane: str, inherited: tuple[int, ...]) -> ForkedWorker:
        """Fork a worker; `inherited` is its end of a pipe, if `how` names one. Raises StagesError if the fork server has ended."""
        their_stdin, stdin = os.pipe()
        status, their_status = os.pipe()
        order = json.dumps({"how": how, "rank": rank, "lane": lane}).encode()
        try:
            socket.send_fds(self._socket, [order], [their_stdin, their_status, *inherited])
        except OSError as error:
            raise StagesError(f"the fork server of the workers has ended ({error})") from error
        finally:
            os.close(their_stdin)
            os.close(their_status)
        return ForkedWorker(stdin, status)

    def close(self) -> None:
        """End it; the workers have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        end_process(self._process, END_SECONDS)
        self._socket.close()


class ForkedWorker:
    """What subprocess.Popen is for a process that this one started itself. Raises StagesError if it does not come to life."""

    def __init__(self, stdin: int, status: int) -> None:
        self.stdin = os.fdopen(stdin, "wb", 0)
        self._status = status
        if not select.select([status], [], [], START_SECONDS)[0] or (pid := self._number()) is None:
            raise StagesError("the fork server of the workers has ended, or says nothing")
        self.pid, self._code = pid, -signal.SIGKILL
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name=f"watch-{pid}", daemon=True).start()

    def _number(self) -> int | None:
        data = os.read(self._status, NUMBER.size)
        return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None

    def _watch(self) -> None:
        """Without a code the fork server has been killed; whoever kills it can kill its workers."""
        code = self._number()
        if code is None:
            self.kill()
        else:
            self._code = code
        os.close(self._status)
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self._code

    def kill(self) -> None:
        """Does nothing once it has ended."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Server:
    """The fork server itself. Ends when its standard input closes, as every process here."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._status: dict[int, int] = {}  # pid -> where its exit code goes
        self._ended, self._bell = os.pipe()
        for each in (self._ended, self._bell):
            os.set_blocking(each, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._bell)

    def run(self) -> None:
        """Until the executor ends."""
        with selectors.DefaultSelector() as selector:
            for each in (0, self._ended, self._orders.fileno()):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if 0 in ready:
                    return
                if self._ended in ready:
                    os.read(self._ended, MOST_BYTES)
                    self._report()
                if self._orders.fileno() in ready:
                    self._fork()

    def _report(self) -> None:
        while self._status:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            target = self._status.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(target, NUMBER.pack(os.waitstatus_to_exitcode(status)))
            os.close(target)

    def _fork(self) -> None:
        data, (stdin, status, *inherited), _, _ = socket.recv_fds(self._orders, MOST_BYTES, MOST_DESCRIPTORS)
        order = json.loads(data)
        if (pid := os.fork()) == 0:
            self._become(order, stdin, [status, *self._status.values()], inherited)
        os.write(status, NUMBER.pack(pid))
        self._status[pid] = status
        for each in (stdin, *inherited):
            os.close(each)

    def _become(self, order: dict[str, str], stdin: int, ours: list[int], inherited: list[int]) -> NoReturn:
        """In the new process: from here on it is the worker."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(stdin, 0)
            for each in (stdin, self._ended, self._bell, *ours):
                os.close(each)
            self._orders.close()
            how = order["how"]
            if inherited:  # it has another number here
                how = f"{PIPE}{inherited[0]}:{how.split(':', 2)[2]}"
            from stage03_engine.core.features.distributed.worker_process import run_worker

            code = run_worker(how, int(order["rank"]), order["lane"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def main(descriptor: int) -> None:
    """Main function of the fork server."""
    wake_as_orphan()
    with socket.socket(fileno=descriptor) as orders:
        import torch  # noqa: F401 - what all workers need, and what takes long

        Server(orders).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
