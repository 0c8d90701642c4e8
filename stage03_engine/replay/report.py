"""The result of a replay: how far it got, and the first decision that differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stage03_engine.replay.recording import Decision

MANY = 8  # requests of each kind that a report names


@dataclass
class Difference:
    """The first decision that differs. `recorded` and `replayed` are facts in words, in the same order."""

    step: int
    request_id: str | None  # the first one that it concerns
    recorded: list[str]
    replayed: list[str]
    before: list[str]  # the state in which both decided

    def __str__(self) -> str:
        lines = [f"step {self.step}: the first decision that differs", "  before:   " + self.before[0]]
        lines += ["            " + line for line in self.before[1:]]
        for label, facts in (("recorded", self.recorded), ("replayed", self.replayed)):
            lines += [f"  {label}: {fact}" for fact in facts[:MANY]]
        if len(self.recorded) > MANY:
            lines.append(f"  and {len(self.recorded) - MANY} more differences")
        return "\n".join(lines)


@dataclass
class Replayed:
    """The result for one engine's recording."""

    proc: str
    pid: int
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    difference: Difference | None = None
    cut_off: int | None = None  # the step in whose middle the recording ends

    def __str__(self) -> str:
        counts = f"steps {self.steps}, requests {self.requests}, scheduled tokens {self.tokens}"
        lines = [
            f"{self.proc} (pid {self.pid}): {counts}" + ("" if self.difference else ": every decision is the same")
        ]
        if self.cut_off is not None:
            lines.append(f"the recording ends in the middle of step {self.cut_off}")
        return "\n".join(lines + ([str(self.difference)] if self.difference else []))


def outcome_in_words(request_id: str, outcome: tuple[int, str | None] | None) -> str:
    """What a step gave a request: outcome = (number of tokens, why it ended or None); None = nothing."""
    if outcome is None:
        return f"{request_id} receives nothing"
    count, reason = outcome
    return f"{request_id} receives {count} tokens" + (f" and ends ({reason})" if reason else "")


def facts_that_differ(recorded: Decision, replayed: Decision) -> tuple[str | None, list[str], list[str]]:
    """Where two decisions differ: (the first request, what the one says, what the other says)."""
    names = [*recorded.preempted, *recorded.scheduled, *replayed.preempted, *replayed.scheduled]
    wrong = [i for i in dict.fromkeys(names) if recorded.about(i) != replayed.about(i)]
    facts = [[f"{i} {side.about(i)}" for i in wrong] for side in (recorded, replayed)]
    for label, of in _OF_ALL.items():
        if of(recorded) != of(replayed):
            facts[0].append(f"{label} {of(recorded)}")
            facts[1].append(f"{label} {of(replayed)}")
    return wrong[0] if wrong else None, facts[0], facts[1]


_OF_ALL: dict[str, Callable[[Decision], object]] = {
    "order of service": lambda d: list(d.scheduled),
    "order of admission": lambda d: list(d.started),
    "order of preemption": lambda d: d.preempted,
    "ended since the last step": lambda d: d.finished,
    "blocks swapped (out, in)": lambda d: d.swapped,
    "free blocks afterwards": lambda d: d.free_blocks,
}
