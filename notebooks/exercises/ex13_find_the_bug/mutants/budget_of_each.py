"""Misconception: a step is within its budget if each of its requests is."""

from __future__ import annotations

from pathlib import Path

from judging import load

from stagetrace.event import Event

REJECTED = "never add up to more than its budget"
reference = load(Path(__file__).parents[1] / "reference.py")
Engine, Finding, diagnosis = reference.Engine, reference.Finding, reference.diagnosis


class Own(Engine):
    def decided(self, event: Event) -> Finding | None:
        if sum(self.tokens.values()) > event.args["budget"] >= max(self.tokens.values()):
            self.tokens = dict.fromkeys(self.tokens, 0)
        return super().decided(event)


def check(events: list[Event]) -> Finding | None:
    engine = Own()
    return next((finding for event in events if (finding := engine.feed(event)) is not None), None)
