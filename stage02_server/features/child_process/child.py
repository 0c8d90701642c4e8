"""The server's side of a process that may be killed at any time (vLLM decodes and renders in the API process)."""

from __future__ import annotations

import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from stage03_engine.args.command import signals_are_ours
from stage03_engine.args.processes import killed_after


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


class ChildProcess:
    """`python -m module arguments`, with a pipe to it and one from it. It ends with this object, or with the server. One thread at a time uses it;
    any may `kill` it."""

    process: subprocess.Popen[bytes] | None = None
    _finalizer: weakref.finalize

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]

    @property
    def runs(self) -> bool:
        """False: it was never started, or has ended since."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start a new process in place of the old one. Raises OSError."""
        self.end()
        pipe = subprocess.PIPE
        with signals_are_ours():
            self.process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._finalizer = weakref.finalize(self, _end, self.process)

    @contextmanager
    def pipes(self, silent_seconds: float) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """(to it, from it), while the `with` block waits for it. A process that is silent for so long is killed, which closes the pipes: then
        whoever uses them gets EOFError or OSError, and `end` says why."""
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with killed_after(process, silent_seconds):
            yield process.stdin, process.stdout

    def kill(self) -> None:
        """Whoever waits for its answer notices."""
        if (running := self.process) is not None:
            running.kill()

    def end(self) -> bool:
        """Kill it, if it still runs, and reap it. True: the system had ended it, because what it did took too long (SIGPROF)."""
        if (ended := self.process) is None:
            return False
        self.process = None
        self._finalizer()
        return ended.returncode == -signal.SIGPROF
