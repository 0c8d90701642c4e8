"""How long a test waits for what must come: nothing but a hang takes so long, however slow or busy the machine is.

No test asserts how long something took; what is fast is measured in `tests/benchmarks`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE = 300.0 * float(os.environ.get("TESTS_PATIENCE", "1"))
"""Seconds. Set TESTS_PATIENCE to a factor where even that is too short, or below 1 to see a hang sooner."""


def wait_until(condition: Callable[[], object], message: str, pause: float = 0.02) -> None:
    """Ask again and again until the condition holds. Raises AssertionError with the message if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(pause)
