"""The engine's end of the template process, which forks the grammar processes (grammar/worker.py has the other end)."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys

from stage03_engine.config import VllmConfig
from stage03_engine.grammar.protocol import ASK, FORK, frame
from stage03_engine.helper_process import signals_are_ours

ANSWER_TIMEOUT = 60.0  # seconds; only a grammar process that somebody has stopped takes so long
TEMPLATE_TIMEOUT = 5.0  # the same of the template process


class GrammarTemplate:
    """The template process that forks the grammar processes; started with the first grammar, again if it is gone."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._num_forks = self._num_earlier = 0  # of all template processes, and of those that are gone

    def connect(self) -> tuple[socket.socket, int]:
        """A socket to a new grammar process, and its number. Returns before that process exists."""
        if self.gone:
            self.shutdown()
            self._num_earlier = self._num_forks
            self._control, theirs = socket.socketpair()
            command = [sys.executable, "-m", "stage03_engine.grammar.worker", str(theirs.fileno())]
            with signals_are_ours():
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            theirs.close()
            with contextlib.suppress(OSError):  # it has ended again; then the new socket is at its end, too
                self._control.sendall(frame(self._config))
        self._num_forks += 1
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [FORK + self._num_forks.to_bytes(4, "little")], [theirs.fileno()])
        ours.settimeout(ANSWER_TIMEOUT)
        return ours, self._num_forks

    @property
    def gone(self) -> bool:
        """True when there is no template process, or its end has begun: it closes its socket before it has an exit code."""
        if self._process is None:
            return True
        try:
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def was_killed(self, number: int) -> bool:
        """Did somebody end this grammar process, which has ended, or the one that forked it? Else it reached a limit."""
        with contextlib.suppress(OSError):
            if number > self._num_earlier and not self.gone:
                self._control.sendall(ASK + number.to_bytes(4, "little"))
                if select.select([self._control], [], [], TEMPLATE_TIMEOUT)[0]:
                    return self._control.recv(1) in (bytes([signal.SIGKILL]), b"")
                self.shutdown()  # stopped: it is of no more use
        return True

    def shutdown(self) -> None:
        """End the process; the grammar processes end with their sockets."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None
