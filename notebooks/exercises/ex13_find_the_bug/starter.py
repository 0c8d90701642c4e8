"""Find the bug: three engines answer every request rightly, and yet something is wrong with each. You have their traces."""

from __future__ import annotations

from dataclasses import dataclass

from stage01_cli.tools.course.exercises import ROOT
from stagetrace.event import Event

RECORDED = ROOT / "trace" / "recorded"
"""Given: where the recordings lie, from whatever folder this is run."""

RULES = {
    "order": "Nobody is admitted while somebody who arrived earlier waits.",
    "turn": "No running request is passed over in a step that gives tokens to one that arrived later.",
    "blocks": "Whoever ends, or is preempted, has given all of its blocks back.",
    "budget": "The tokens that a step gives to its requests never add up to more than its budget.",
}
"""What holds in every step of these engines: they serve first come, first served, one step at a time."""


@dataclass(frozen=True)
class Finding:
    """A broken rule, where it shows for the first time.

    rule      order, turn, blocks or budget
    step      the `step` of the event that shows it (see check)
    request   the id of the request that suffers (order, turn) or that kept its blocks; "" for budget
    blocks    for blocks: the numbers of those that it kept, sorted; for the others ()
    """

    rule: str
    step: int
    request: str = ""
    blocks: tuple[int, ...] = ()


def diagnosis(recording: str) -> Finding:
    """What you found in trace/recorded/bug_starvation, bug_leak and bug_stall: `recording` is the name of one of these folders.

    Here a request may have its short name: "r3" instead of "cmpl-r3-5bd4c0a2-0".
    """
    raise NotImplementedError


def check(events: list[Event]) -> Finding | None:
    """The first finding in the events of one engine, which are in order; None for a healthy one.

    An event has `name`, `req` (the request's id, or None), `step` (a number, or None) and `args` (a dict). These matter:

    sched.queued       req arrives. Whoever was queued first is first, for as long as it lives.
    sched.admit        req, which waited for the first time, runs from now on. Shows a broken `order`:
    sched.resume       req, which was preempted, runs again.                   if somebody who arrived earlier waits now,
                       the one of these who arrived first suffers.
    sched.preempt      req runs no more; it waits again. Shows broken `blocks`.
    sched.finished     req has ended. Shows broken `blocks`.
    sched.scheduled    req gets args["num_tokens"] tokens in this step.
    sched.output       the step is decided; its budget is args["budget"]. Shows a broken `budget`, or a broken `turn`: who
                       was running before this step, was not preempted in it, and got nothing, although one that arrived later
                       got tokens. Of several, the one who arrived first suffers. If both are broken, it is the budget.
    kv.allocated       req takes args["blocks"].
    sched.prefix_hit   req takes args["blocks"], too: found in the cache, perhaps shared with others who hold them.
    kv.freed           req gives args["blocks"] back. It comes before the sched.preempt or sched.finished to which it belongs.

    There are more events; they do not matter. `events` is not to be changed.
    """
    raise NotImplementedError
