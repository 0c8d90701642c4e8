"""Misconception: nothing is wrong until somebody complains: nothing is found."""

from __future__ import annotations

from pathlib import Path

from judging import load

from stagetrace.event import Event

REJECTED = "Nobody is admitted while somebody who arrived earlier waits."
reference = load(Path(__file__).parents[1] / "reference.py")
Engine, Finding, diagnosis = reference.Engine, reference.Finding, reference.diagnosis


def check(events: list[Event]) -> Finding | None:
    return None
