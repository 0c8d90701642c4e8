"""An end for helper processes that a signal has stopped, or that get no turn: their limits count CPU time, and theirs stands still."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

UNANSWERED_SECONDS = 60.0  # beyond the limit of CPU time, as with grammars


@contextmanager
def killed_after(process: subprocess.Popen[bytes], cpu_seconds: float = 0.0) -> Iterator[None]:
    """While this block waits for the process, which may compute for `cpu_seconds`. One that stays silent for UNANSWERED_SECONDS more is
    killed, so that the block sees its pipes close."""
    timer = threading.Timer(cpu_seconds + UNANSWERED_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
