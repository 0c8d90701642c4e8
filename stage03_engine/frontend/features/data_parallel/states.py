"""The event that tells those who watch the schedulers what each of several engines is doing (vLLM has no counterpart)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping

from stagetrace import VOCABULARY, Event, trace
from stagetrace.event import FORMAT_VERSION, encode

_numbers = itertools.count(1)


def states_event(states: Mapping[int, str]) -> bytes:
    """Engine -> state, as the trace event `dp.engines`: a line of JSON. While a trace is on, it is recorded too."""
    told = {str(engine): str(state) for engine, state in states.items()}
    if trace.on:
        trace.emit("dp.engines", states=told)
    row = VOCABULARY["dp.engines"]
    head = (FORMAT_VERSION, next(_numbers), time.monotonic_ns(), os.getpid(), trace.proc, "i", row.name, row.phase)
    return encode(Event(*head, os.path.basename(__file__), args={"states": told}))
