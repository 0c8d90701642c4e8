"""Start a process that ends with this one, and a private folder for the sockets between the two.

The API server starts the engine with it, an engine its workers, and the launcher of several API servers the coordinator.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stage03_engine.args.command import WAITING, signals_are_ours
from stage03_engine.plugins import find
from stagetrace import trace

PREFIX = "stages-"
MAX_IPC_PATH = 80  # a Unix socket path has room for 107 bytes, on macOS for 103; leave some for the file name
PR_SET_PDEATHSIG = 1  # of prctl(2)
RENDEZVOUS = "rendezvous"  # the file through which workers find each other, in the folder of their sockets


def base_folder() -> str:
    """Where the socket folders go: the temporary folder, unless its name is too long for a socket's path."""
    base = tempfile.gettempdir()
    return "/tmp" if len(base) > MAX_IPC_PATH - 20 else base


class SocketFolder:
    """A folder that only this user may enter: access to a socket is control over the engine."""

    prefix = PREFIX  # of its name

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=self.prefix, dir=base_folder()))  # mkdtemp makes it with mode 0700

    def remove(self) -> None:
        """Call it once the sockets are closed. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)


def private_folder() -> SocketFolder:
    """A new folder; one that the next start removes after a kill -9, if the feature that does so is there."""
    claim_folder = find("engine", "socket_folder")
    return SocketFolder() if claim_folder is None else claim_folder()


def engine_environment(num_threads: int, attention_backend: str = "auto") -> dict[str, str]:
    """Environment of the engine process. Triton reads from it whether to interpret kernels, and OpenMP how its threads wait, when
    they are loaded: so both are set before the process exists. What the user has set stays."""
    threads = str(num_threads)
    waiting = {} if any(name in os.environ for name in WAITING) else WAITING
    interpret = {"TRITON_INTERPRET": "1"} if attention_backend == "triton-interpret" else {}
    return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **waiting, **interpret}


def start_process(
    module: str, *args: str, environment: Mapping[str, str] | None = None, inherited: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start `python -m module args`. The child never receives SIGINT and SIGTERM (see `signals_are_ours`). Its standard input is a pipe
    from this process, which closes when this process ends, even by kill -9: see `end_with_parent`. `inherited`: descriptors that it
    gets too. Raises OSError."""
    with signals_are_ours():
        command = [sys.executable, "-m", module, *args]
        return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env=environment, pass_fds=inherited)


@contextlib.contextmanager
def killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """While the `with` block waits for the process. One that is silent for so long, because a signal has stopped it, is killed: its pipes close."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until the process has ended, and kill it if that takes longer than `seconds`."""
    with killed_after(process, seconds):
        process.wait()


def exit_reason(code: int) -> str:
    """An exit code, and what it means if the process was killed."""
    why = " (killed, as a system does that runs out of memory)" if code == -signal.SIGKILL else ""
    return f"exit code {code}{why}"


def end_with_parent(folder: Path | None, asked_to_end: Callable[[], None] = lambda: None) -> None:
    """In a child: from now on a thread watches standard input. It calls `asked_to_end` when the parent writes to it. When the pipe
    closes, it removes the `folder` of the sockets, if there is one, and ends this process.

    os._exit, because the main thread may be deep in a forward pass, or wait for a process that is dead.
    """
    wake_as_orphan()

    def watch() -> None:
        while os.read(0, 4096):
            asked_to_end()
        trace.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def wake_as_orphan() -> None:
    """Let the system continue this process when its parent ends, in case a signal has stopped it (Linux only).

    Each child ends when its standard input closes. One that is stopped does not notice, and would stay behind. So every child calls
    this before anything that takes long.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
