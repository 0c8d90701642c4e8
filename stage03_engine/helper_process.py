"""Signals and the processes that work for another one: the engine, and those that render templates and check grammars.

Ctrl-C in a terminal, and systemd at the end of a service, send their signal to all processes of a server. Only the API process
may act on it: running requests are to finish first, for which it needs the others. (vLLM's engine ends on SIGTERM.)
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_are_ours() -> Iterator[None]:
    """Processes that are started inside the `with` block never hear of SIGINT and SIGTERM, from their first instruction on,
    and neither do those that they start. Each ends when its end of a pipe or a socket closes."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}
    )  # a process inherits what is blocked
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
