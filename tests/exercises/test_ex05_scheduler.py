"""The judge of exercise 5: serve many small loads without a model, and look at every decision."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hypothesis import given
from judging import Judge
from scheduler_load import MOST_STEPS, Load, Step, loads, run

from stage03_engine.core.scheduler import Scheduler
from stagetrace import trace

judge = Judge(5)


@judge.settings(150)
@given(load=loads())
def test_every_step_keeps_the_rules(impl: ModuleType, load: Load) -> None:
    with judge.case(load=load):
        number = 0
        for number, step in enumerate(run(impl.Scheduler, load), start=1):
            with judge.case(step=f"{number}: waiting {step.waiting}, running {step.running}"):
                judge.equal("numbered", number, step.output.step)
                check_step(load, step)
        judge.holds("ends", number < MOST_STEPS, f"the end within {MOST_STEPS} steps", "requests that never end")


def check_step(load: Load, step: Step) -> None:
    total, budget, tokens = sum(step.tokens.values()), load.max_num_batched_tokens, step.tokens
    judge.holds("budget", total <= budget, f"at most {budget} tokens", f"{total} tokens: {tokens}")
    seats = len(step.running_after)
    judge.holds("seats", seats <= load.max_num_seqs, f"at most {load.max_num_seqs} running", f"{seats} running")
    check_preempted(step)
    if load.threshold and len(step.missing) > 1:
        most = max(tokens.values(), default=0)
        judge.holds(
            "threshold", most <= load.threshold, f"at most {load.threshold} tokens each", f"{most} tokens: {tokens}"
        )
    check_admitted(load, step)
    check_running(load, step)
    for name, got in tokens.items():
        expected = computed_before(step, name) + got
        judge.holds("counted", step.computed_after[name] == expected, f"{name} has {expected} computed tokens",
                    f"it has {step.computed_after[name]}")  # fmt: skip


def check_preempted(step: Step) -> None:
    preempted = step.output.preempted_req_ids
    judge.holds("no_newcomer", not (preempted and step.admitted), f"nobody admitted beside the preempted {preempted}",
                f"{step.admitted} admitted")  # fmt: skip
    last = step.running[::-1][: len(preempted)]
    judge.equal("preempt_last", last, preempted)


def check_admitted(load: Load, step: Step) -> None:
    judge.equal("order", step.waiting[: len(step.admitted)], step.admitted)
    for new in step.output.scheduled_new_reqs:
        got, missing = step.tokens.get(new.request_id, 0), len(new.token_ids) - new.num_computed_tokens
        if not load.chunked:
            judge.holds("whole", got == missing, f"all {missing} missing tokens of {new.request_id}", f"{got} of them")


def check_running(load: Load, step: Step) -> None:
    left = load.max_num_batched_tokens
    for name in [each for each in step.running if each not in step.output.preempted_req_ids]:
        most = load.threshold if load.threshold and len(step.missing) > 1 else step.missing[name]
        expected, got = min(step.missing[name], left, most), step.tokens.get(name, 0)
        judge.holds("all_missing", got == expected, f"{expected} tokens for {name}", f"{got} tokens")
        left -= expected


def computed_before(step: Step, name: str) -> int:
    """A request that was admitted in this step begins where the worker is told."""
    told = {new.request_id: new.num_computed_tokens for new in step.output.scheduled_new_reqs}
    return told.get(name, step.computed[name])


@judge.settings(150)
@given(load=loads())
def test_the_decisions_are_the_references(impl: ModuleType, load: Load) -> None:
    with judge.case(load=load):
        for number, (step, right) in enumerate(zip(run(impl.Scheduler, load), run(Scheduler, load)), start=1):
            with judge.case(step=f"{number}: waiting {right.waiting}, running {right.running}"):
                check_cached(step, right)
                judge.equal("decisions", different(right, step), different(step, right))


def check_cached(step: Step, right: Step) -> None:
    begin = [{n.request_id: n.num_computed_tokens for n in each.output.scheduled_new_reqs} for each in (right, step)]
    for name in begin[0].keys() & begin[1].keys():
        judge.holds("cached", begin[0][name] == begin[1][name], f"{name} starts after {begin[0][name]} cached tokens",
                    f"after {begin[1][name]}")  # fmt: skip


@judge.settings(100)
@given(load=loads())
def test_the_trace_hears_why_somebody_waits(impl: ModuleType, load: Load) -> None:
    with judge.case(load=load):
        for number, (told, right) in enumerate(zip(reasons(impl.Scheduler, load), reasons(Scheduler, load)), start=1):
            with judge.case(step=number):
                judge.equal("says_why", right, told)


def reasons(scheduler_class: Any, load: Load) -> Iterator[str]:
    """What the trace hears after each step."""
    steps = run(scheduler_class, load)
    while True:
        with patch.object(trace, "on", True), patch.object(trace, "emit") as emit:
            if next(steps, None) is None:
                return
        held = [call.kwargs for call in emit.call_args_list if call.args == ("sched.held_back",)]
        told = [f"{each['first']} waits ({each['rule']}), budget left {each['budget_left']}" for each in held]
        yield ", and ".join(told) or "nobody waits"


def different(step: Step, other: Step) -> dict[str, Any]:
    """The part of a decision that differs from the other's."""
    return {key: value for key, value in step.decision.items() if value != other.decision[key]}
