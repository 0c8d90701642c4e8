"""An end for helper processes that a signal has stopped, or that get no turn: their limits count CPU time, and theirs stands still."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """While this block waits for the process. One that stays silent for so many seconds is killed, so that the block sees its pipes close."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
