"""The judge of exercise 13: recorded engines, and engines whose traces are made here."""

from __future__ import annotations

from dataclasses import astuple
from functools import cache
from types import ModuleType
from typing import Any

from broken_engines import BROKEN, Aborts, HitsLeak, PreemptionLeaks, SkipsTheSecond, trace_of
from hypothesis import example, given, strategies as st
from judging import Judge, load as load_file
from scheduler_load import Arrival, Load, loads

from stage01_cli.tools.course.exercises import ROOT
from stage03_engine.core.scheduler import Scheduler
from stagetrace import read_run
from stagetrace.event import Event, encode_line

judge = Judge(13)
right = load_file(judge.exercise.folder / "reference.py").check
RECORDED = ROOT / "trace" / "recorded"
HEALTHY = (
    "one_request",
    "mixed",
    "prefix_hits",
    "client_abort",
    "bug_leak_healthy",
    "bug_stall_healthy",
    "bug_starvation_healthy",
)
BUGS = ("bug_starvation", "bug_leak", "bug_stall")
ABORTS = st.builds(
    lambda pairs: Aborts(tuple(pairs)), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=2)
)


@st.composite
def crowds(draw: st.DrawFn) -> Load:
    """Loads that are too much at once: for few blocks, or for a small budget."""
    arrival = st.builds(Arrival, st.integers(0, 2), st.integers(1, 9), st.integers(2, 7), st.integers(0, 1))
    arrivals = sorted(draw(st.lists(arrival, min_size=3, max_size=4)), key=lambda each: each.step)
    longest = max(each.prompt + each.answer for each in arrivals)
    blocks = -(-longest // 2) + draw(st.integers(0, 3))
    return Load(
        tuple(arrivals), draw(st.integers(3, 6)), draw(st.integers(2, 3)), blocks, 2, caching=draw(st.booleans())
    )


@cache
def recorded(name: str) -> list[Event]:
    return [event for event in read_run(RECORDED / name).events if event.proc.startswith("EngineCore")]


def test_a_healthy_recording(impl: ModuleType) -> None:
    for name in HEALTHY:
        with judge.case(recording=f"trace/recorded/{name}"):
            found = impl.check(list(recorded(name)))
            agree(None, found, recorded(name))


@judge.settings(30)
@given(load=loads(most_requests=4), aborts=ABORTS)
def test_a_healthy_engine(impl: ModuleType, load: Load, aborts: Aborts) -> None:
    with judge.case(load=load, aborts=aborts):
        events = trace_of(Scheduler, load, aborts)
        before = [encode_line(event) for event in events]
        found = impl.check(events)
        agree(None, found, events)
        judge.holds("unchanged", before == [encode_line(event) for event in events], "the same events", "others")


@judge.settings(40)
@given(kind=st.sampled_from(BROKEN["order"]), load=crowds(), aborts=ABORTS)
def test_the_order(impl: ModuleType, kind: type[Scheduler], load: Load, aborts: Aborts) -> None:
    look_at(impl, kind, load, aborts)


@judge.settings(25)
@given(kind=st.sampled_from(BROKEN["turn"]), load=crowds(), aborts=ABORTS)
@example(kind=SkipsTheSecond, load=Load((Arrival(0, 1, 3),) * 3, 6, 3, 12, 2), aborts=Aborts())
def test_whose_turn_it_is(impl: ModuleType, kind: type[Scheduler], load: Load, aborts: Aborts) -> None:
    look_at(impl, kind, load, aborts)


@judge.settings(30)
@given(kind=st.sampled_from(BROKEN["blocks"]), load=crowds(), aborts=ABORTS)
@example(kind=PreemptionLeaks, load=Load((Arrival(0, 3, 5),) * 3, 6, 3, 6, 2), aborts=Aborts())
@example(kind=HitsLeak, load=Load((Arrival(0, 6, 3), Arrival(2, 6, 3)), 8, 2, 12, 2, caching=True), aborts=Aborts())
def test_the_blocks(impl: ModuleType, kind: type[Scheduler], load: Load, aborts: Aborts) -> None:
    look_at(impl, kind, load, aborts)


@judge.settings(25)
@given(kind=st.sampled_from(BROKEN["budget"]), load=crowds(), aborts=ABORTS)
def test_the_budget(impl: ModuleType, kind: type[Scheduler], load: Load, aborts: Aborts) -> None:
    look_at(impl, kind, load, aborts)


def look_at(impl: ModuleType, kind: type[Scheduler], load: Load, aborts: Aborts) -> None:
    with judge.case(load=load, aborts=aborts):
        events = trace_of(kind, load, aborts)
        agree(right(list(events)), impl.check(list(events)), events)


def test_the_recorded_bugs(impl: ModuleType) -> None:
    """What the check finds in them is not told: it is the diagnosis."""
    for name in BUGS:
        with judge.case(recording=f"trace/recorded/{name}"):
            expected, got = right(list(recorded(name))), impl.check(list(recorded(name)))
            judge.holds("first", parts(expected) == parts(got), "another finding", repr(got))


def test_the_diagnosis(impl: ModuleType) -> None:
    for name in BUGS:
        with judge.case(recording=f"trace/recorded/{name}"):
            expected, got = right(recorded(name)), impl.diagnosis(name)
            wrong = [
                part for part, a, b in zip(("rule", "step", "request", "blocks"), short(expected), short(got)) if a != b
            ]
            judge.holds(
                "diagnosis", not wrong, "another answer; look again", f"{got!r}: not right is the {', '.join(wrong)}"
            )


def short(finding: Any) -> tuple[Any, ...]:
    """What it says, with the short name of its request."""
    rule, step, request, blocks = parts(finding)
    return rule, step, request.split("-")[1] if request.startswith("cmpl-") else request, blocks


def parts(finding: Any) -> tuple[Any, ...]:
    """rule, step, request, blocks. A solution may have a class of its own."""
    if finding is None:
        return None, None, "", ()
    rule, step, request, blocks = astuple(finding)
    return rule, step, request or "", tuple(blocks)


def agree(expected: Any, found: Any, events: list[Event]) -> None:
    """The two findings are the same."""
    (rule, step, *whose), (got_rule, got_step, *got_whose) = parts(expected), parts(found)
    key = "healthy" if rule is None else rule if got_rule != rule and (got_step is None or got_step > step) else "first"
    with judge.case(events=around(events, expected or found)):
        judge.holds(key, rule == got_rule and step == got_step, repr(expected), repr(found))
        judge.holds("whose", whose == got_whose, repr(expected), repr(found))


def around(events: list[Event], finding: Any) -> str:
    """The events that matter of the step of a finding."""
    step = parts(finding)[1]
    if step is None:
        return "all"
    told = [event for event in events if event.name.startswith(("sched.", "kv.")) and of_step(events, event) == step]
    return "".join(f"\n    {line(event)}" for event in told[-8:])


def of_step(events: list[Event], event: Event) -> int | None:
    """Its own step, or that of the next event that has one."""
    later = events[next(place for place, each in enumerate(events) if each is event) :]
    return next((each.step for each in later if each.step is not None), None)


def line(event: Event) -> str:
    keys = ("num_tokens", "blocks", "budget", "reason")
    return " ".join([event.name, event.req or "", *(f"{key}={event.args[key]}" for key in keys if key in event.args)])
