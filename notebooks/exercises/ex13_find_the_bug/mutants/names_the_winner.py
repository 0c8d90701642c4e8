"""Misconception: the finding names the one that pushed in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from judging import load

from stagetrace.event import Event

REJECTED = "names the request that suffers"
reference = load(Path(__file__).parents[1] / "reference.py")
Engine, Finding, diagnosis = reference.Engine, reference.Finding, reference.diagnosis


def check(events: list[Event]) -> Finding | None:
    found = reference.check(events)
    if found is None or found.rule != "order":
        return found
    admitted = [e.req for e in events if e.step == found.step and e.name in ("sched.admit", "sched.resume")]
    return replace(found, request=admitted[-1])
