"""Misconception: a block found in the cache belongs to whoever computed it, so it is not counted; giving it back again frees nothing."""

from __future__ import annotations

from pathlib import Path

from judging import load

from stagetrace.event import Event

REJECTED = "ValueError: list.remove(x): x not in list"
reference = load(Path(__file__).parents[1] / "reference.py")
Engine, Finding, diagnosis = reference.Engine, reference.Finding, reference.diagnosis


class Own(Engine):
    def feed(self, event: Event) -> Finding | None:
        return None if event.name == "sched.prefix_hit" else super().feed(event)


def check(events: list[Event]) -> Finding | None:
    engine = Own()
    return next((finding for event in events if (finding := engine.feed(event)) is not None), None)
