"""Misconception: who was admitted first was there first."""

from __future__ import annotations

from pathlib import Path

from judging import load

from stagetrace.event import Event

REJECTED = "Finding(rule='order', step=1, request='cmpl-r1"
reference = load(Path(__file__).parents[1] / "reference.py")
Engine, Finding, diagnosis = reference.Engine, reference.Finding, reference.diagnosis


class Own(Engine):
    def feed(self, event: Event) -> Finding | None:
        if event.name in ("sched.admit", "sched.resume", "sched.queued"):
            self.arrival.pop(event.req or "", None)
            self.arrival[event.req or ""] = event.seq
        return super().feed(event)


def check(events: list[Event]) -> Finding | None:
    engine = Own()
    return next((finding for event in events if (finding := engine.feed(event)) is not None), None)
