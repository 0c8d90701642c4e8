"""Misconception: the bug shows when its effect shows, in the step after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from judging import load

from stagetrace.event import Event

REJECTED = "with the step of the event that shows it"
reference = load(Path(__file__).parents[1] / "reference.py")
Engine, Finding, diagnosis = reference.Engine, reference.Finding, reference.diagnosis


def check(events: list[Event]) -> Finding | None:
    found = reference.check(events)
    return found and replace(found, step=found.step + 1)
