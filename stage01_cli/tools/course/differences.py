"""The first difference of two runs of the same load, in words: the settings, the step, the request and its rule, the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stage01_cli.tools.course.load import Answer, differing
from stagetrace.check.difference import Lane, Result, StepFacts
from stagetrace.check.reasons import explain, find_request
from stagetrace.errors import TraceError
from stagetrace.read.reader import Recording

FACTS = 6  # of a step that are shown; the rest follows from them
_ID = re.compile(r"\bcmpl-([a-zA-Z0-9_]+)-[0-9a-f*]+(?:-\d+)?")
_OUR_OWN = ("trace",)  # settings: the folders of the two runs


def plain(text: str) -> str:
    """With the names of the load in the place of ids: r0."""
    return _ID.sub(r"\1", text)


def settings_of(trace: Path) -> dict[str, str]:
    """Each setting that is not a default, with its source."""
    for event in Recording(trace):
        if event.name == "config.resolved":
            folder = f"({trace.parent}/"  # of the config file
            return {
                name: _of_a_part(where.replace(folder, "("))
                for name, where in event.args["settings"].items()
                if name not in _OUR_OWN
            }
    return {}


def _of_a_part(where: str) -> str:
    """Without the file's name: a class behind the door is `student_ex15_feature:NoRepeatNgram`, and the reference's has another file."""
    before, mark, after = where.partition("'student_")
    return f"{before}'student:{after.partition(':')[2]}" if mark else where


def of_settings(right: Path, own: Path) -> Iterator[str]:
    """The settings that the two servers resolved otherwise."""
    a, b = settings_of(right), settings_of(own)
    for name in [*a, *(name for name in b if name not in a)]:
        if a.get(name) != b.get(name):
            yield f"setting {name}: A {a.get(name, 'default')}, B {b.get(name, 'default')}"


def of_answers(expected: dict[str, Answer], got: dict[str, Answer]) -> Iterator[str]:
    """The answers that differ, the first of them in detail."""
    found = {name: words for name in expected if (words := differing(expected[name], got[name]))}
    for name, words in list(found.items())[:1]:
        yield f"the answer to {name} differs: {words}"
    if len(found) > 1:
        yield f"so do the answers to {', '.join(list(found)[1:])}"


def of_decisions(result: Result, right: Path, own: Path) -> Iterator[str]:
    """The first step that differs, and why each side did what it did there. If no step does: the first event of a request."""
    for lane in list(result.steps.values())[:1]:
        yield from _of_step(lane, right, own)
    if not result.steps:
        for name, lane in list(result.requests.items())[:1]:
            yield f"{plain(name)}, its event {lane.place + 1}:"
            yield f"  A: {plain(str(lane.a)) if lane.a else 'has ended'}"
            yield f"  B: {plain(str(lane.b)) if lane.b else 'has ended'}"


def _of_step(lane: Lane, right: Path, own: Path) -> Iterator[str]:
    sides = [item if isinstance(item, StepFacts) else None for item in (lane.a, lane.b)]
    number = next(side.step for side in sides if side is not None)
    yield f"step {number} is the first that differs:"
    facts = [side.facts if side is not None else [] for side in sides]
    concerned: list[str] = []
    for label, mine, other in zip("AB", facts, reversed(facts)):
        different = [fact for fact in mine if fact not in other]
        for fact in different[:FACTS]:
            yield f"  {label} does: {plain(str(fact))}"
        if len(different) > FACTS:
            yield f"  {label} does {len(different) - FACTS} things more"
        concerned += [plain(fact.req) for fact in different if fact.req]
    if facts[0] != facts[1] and not concerned and all(fact in facts[1] for fact in facts[0]):
        yield "  both do the same, in another order"
    first = next(iter(concerned), None)
    why = [list(_why(trace, first, number)) if side and first else [] for trace, side in zip((right, own), sides)]
    for label, side, reasons, others in zip("AB", sides, why, reversed(why)):
        if side is None:
            yield f"  {label} has ended before"
        yield from (f"  why in {label}, {first}: {line}" for line in reasons if line not in others)


def _why(trace: Path, name: str, number: int) -> Iterator[str]:
    """What a trace says of the request in this step."""
    try:
        for step in explain(trace, find_request(trace, f"-{name}-")):
            if step.step == number:
                yield from (f"{plain(reason.text)} (rule: {reason.places})" for reason in step.reasons)
    except TraceError as error:
        yield str(error)
