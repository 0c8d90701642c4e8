"""Misconception: whoever ends by itself has been tidied up; only an abort can leave something behind."""

from __future__ import annotations

from pathlib import Path

from judging import load

from stagetrace.event import Event

REJECTED = "has given all of its blocks back"
reference = load(Path(__file__).parents[1] / "reference.py")
Engine, Finding, diagnosis = reference.Engine, reference.Finding, reference.diagnosis


class Own(Engine):
    def leaves(self, event: Event, request: str) -> Finding | None:
        finding = super().leaves(event, request)
        return finding if event.args.get("reason") == "abort" else None


def check(events: list[Event]) -> Finding | None:
    engine = Own()
    return next((finding for event in events if (finding := engine.feed(event)) is not None), None)
