"""Which events a recording keeps: by phase, by name, by request, or a share of all requests."""

from __future__ import annotations

import difflib
import hashlib
from fnmatch import fnmatchcase
from typing import Any

from stagetrace.event import Event
from stagetrace.ids import root_of
from stagetrace.vocabulary import VOCABULARY

PHASES = range(1, 10)
_REMEMBERED = 4096  # verdicts on requests, and steps; older ones are forgotten


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_phases(text: str) -> frozenset[int]:
    """`7,8` -> {7, 8}. Raises ValueError for what is not a phase."""
    words = _words(text)
    wrong = [word for word in words if not word.isdecimal() or int(word) not in PHASES]
    if wrong or not words:
        raise ValueError(f"{(wrong or [text])[0]!r} is not a phase; give numbers from 1 to 9, such as 7,8")
    return frozenset(map(int, words))


def parse_names(text: str) -> tuple[str, ...]:
    """`sched.*,kv.*` -> the patterns. Raises ValueError for one that matches no name of the vocabulary."""
    patterns = _words(text)
    for pattern in patterns or [text]:
        if not any(fnmatchcase(name, pattern) for name in VOCABULARY):
            families = {name.partition(".")[0] + ".*" for name in VOCABULARY}
            close = difflib.get_close_matches(pattern, [*VOCABULARY, *families], n=1)
            hint = f"; did you mean {close[0]}?" if close else "; names look like sched.admit, patterns like sched.*"
            raise ValueError(f"{pattern!r} matches no event{hint}")
    return tuple(patterns)


def parse_requests(text: str) -> tuple[str, ...]:
    """`cmpl-1f*,r0` -> the patterns. Raises ValueError if there is none."""
    if not _words(text):
        raise ValueError(f"{text!r} holds no pattern; give request ids or patterns such as cmpl-1f*")
    return tuple(_words(text))


class EventFilter:
    """Decides event by event; one object per process, called under the recorder's lock.

    Phases and names look at the event alone. Requests and sampling look at its request, by this rule:

    - A request is kept when its id or its root (`ids.root_of`) matches one of the patterns, and when the hash of its root
      falls into the sample. The root is the same for the HTTP events, all prompts, answers and beams of one HTTP request
      and in both processes, so a request is recorded whole or not at all.
    - An event of an engine step without a request of its own (`engine.step`, `sched.output`, `model.forward`, ...) is kept
      when a kept request takes part in the step: it waits in memory until one is seen, or the next step begins. The front
      end knows it by the cause: the engine gives one only to the outputs of a kept step.
    - What belongs to neither a request nor a step is kept in phases 1 to 5 (start-up, shutdown, death of the engine) and left
      out in phases 6 to 9 (a `GET /health`).
    """

    def __init__(
        self, phases: str | None = None, names: str | None = None, requests: str | None = None, sample: float = 1.0
    ) -> None:
        """The texts are those of the flags; None keeps all. Raises ValueError that says what is wrong."""
        if not 0.0 < sample <= 1.0:
            raise ValueError(
                f"{sample} is not a share of the requests; give a number above 0 and up to 1, such as 0.01"
            )
        self._phases = None if phases is None else parse_phases(phases)
        self._names = None if names is None else parse_names(names)
        self._requests = None if requests is None else parse_requests(requests)
        self._sample = sample
        self._by_request = self._requests is not None or sample < 1.0
        self._kept_requests: dict[str, bool] = {}
        self._kept_steps: dict[int, None] = {}
        self._step = 0  # the newest step seen
        self._inside = (
            False  # between its beginning and its end: what a request does there belongs to it (kv.allocated)
        )
        self._waiting: list[Event] = []  # its events, while no kept request is known to take part in it

    @property
    def active(self) -> bool:
        """False if every event is kept."""
        return bool(self.header)

    @property
    def header(self) -> dict[str, Any]:
        """What `run.start` says about it: only what is restricted, so an empty dict means a complete recording."""
        phases = {} if self._phases is None else {"phases": sorted(self._phases)}
        names = {} if self._names is None else {"names": list(self._names)}
        requests = {} if self._requests is None else {"requests": list(self._requests)}
        return phases | names | requests | ({"sample": self._sample} if self._sample < 1.0 else {})

    def admit(self, event: Event) -> list[Event]:
        """The events to record now: none, this one, or those that had waited for it and then this one."""
        if not self._by_request or event.phase < 6:
            admitted = [event]
        elif event.req is not None:
            admitted = self._of_request(event, event.req)
        else:
            admitted = self._of_step(event)
        return [each for each in admitted if self._kept_by_row(each)]

    def _kept_by_row(self, event: Event) -> bool:
        if event.phase == 0:
            return True
        if self._phases is not None and event.phase not in self._phases:
            return False
        return self._names is None or any(fnmatchcase(event.name, pattern) for pattern in self._names)

    def _of_request(self, event: Event, request_id: str) -> list[Event]:
        kept = self._kept_requests.get(request_id)
        if kept is None:
            if len(self._kept_requests) >= _REMEMBERED:
                self._kept_requests.clear()
            kept = self._kept_requests[request_id] = self._keeps(request_id)
        if not kept:
            return []
        step = self._step if event.step is None and event.phase == 8 and self._inside else event.step
        return [event] if step is None else [*self._keep_step(step), event]

    def _keeps(self, request_id: str) -> bool:
        root = root_of(request_id)
        patterns = self._requests
        if patterns is not None and not any(fnmatchcase(i, p) for p in patterns for i in (request_id, root)):
            return False
        digest = hashlib.blake2b(root.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._sample * 2**64

    def _of_step(self, event: Event) -> list[Event]:
        step = self._step if event.step is None and event.phase == 8 else event.step  # kv.evicted carries no step
        if step is None:
            return []
        if event.name == "engine.step":
            self._inside = event.ph == "B"
        if step in self._kept_steps:
            return [event]
        if event.cause is not None:
            return [*self._keep_step(step), event]
        if step > self._step:
            self._step, self._waiting = step, []
        if step == self._step:
            self._waiting.append(event)
        return []

    def _keep_step(self, step: int) -> list[Event]:
        """Keep this step from now on; return its events that were waiting."""
        if step in self._kept_steps:
            return []
        if len(self._kept_steps) >= _REMEMBERED:
            del self._kept_steps[next(iter(self._kept_steps))]
        self._kept_steps[step] = None
        if step < self._step:
            return []
        waiting = self._waiting if step == self._step else []
        self._step, self._waiting = step, []
        return waiting
