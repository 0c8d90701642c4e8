"""A check that finds the broken rule. It answers what the exercise asks: do not read on before you have your own."""

from __future__ import annotations

from dataclasses import dataclass, field

from stage01_cli.tools.course.exercises import ROOT
from stagetrace import read_run
from stagetrace.event import Event

RECORDED = ROOT / "trace" / "recorded"


@dataclass(frozen=True)
class Finding:
    """A broken rule."""

    rule: str
    step: int
    request: str = ""
    blocks: tuple[int, ...] = ()


@dataclass
class Engine:
    """What an engine's events say of it so far."""

    arrival: dict[str, int] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)  # from before this step
    admitted: set[str] = field(default_factory=set)  # in this step
    tokens: dict[str, int] = field(default_factory=dict)  # of this step
    held: dict[str, list[int]] = field(default_factory=dict)

    def feed(self, event: Event) -> Finding | None:
        """Process an event; what it shows."""
        request, args = event.req or "", event.args
        match event.name:
            case "sched.queued":
                self.arrival[request] = len(self.arrival)
                self.waiting.add(request)
            case "sched.admit" | "sched.resume":
                self.waiting.discard(request)
                self.admitted.add(request)
                return self.first("order", event, [e for e in self.waiting if self.before(e, request)])
            case "sched.preempt" | "sched.finished":
                return self.leaves(event, request)
            case "kv.allocated" | "sched.prefix_hit":
                self.held.setdefault(request, []).extend(args["blocks"])
            case "kv.freed":
                for block in args["blocks"]:
                    self.held[request].remove(block)
            case "sched.scheduled":
                self.tokens[request] = self.tokens.get(request, 0) + args["num_tokens"]
            case "sched.output":
                return self.decided(event)
        return None

    def before(self, one: str, other: str) -> bool:
        """Did one arrive before the other?"""
        return self.arrival[one] < self.arrival[other]

    def first(self, rule: str, event: Event, requests: list[str]) -> Finding | None:
        """The finding that the first of these requests suffers, if there is any."""
        if not requests:
            return None
        return Finding(rule, event.step or 0, min(requests, key=self.arrival.__getitem__))

    def leaves(self, event: Event, request: str) -> Finding | None:
        """A request is preempted, or ends."""
        for state in (self.waiting, self.running, self.admitted):
            state.discard(request)
        if event.name == "sched.preempt":
            self.waiting.add(request)
        left = self.held.pop(request, [])
        return Finding("blocks", event.step or 0, request, tuple(sorted(left))) if left else None

    def decided(self, event: Event) -> Finding | None:
        """A step is decided; the next one begins."""
        tokens, self.tokens = self.tokens, {}
        passed = [e for e in self.running if e not in tokens and any(self.before(e, other) for other in tokens)]
        self.running, self.admitted = self.running | self.admitted, set()
        if sum(tokens.values()) > event.args["budget"]:
            return Finding("budget", event.step or 0)
        return self.first("turn", event, passed)


def check(events: list[Event]) -> Finding | None:
    """The first finding of all."""
    engine = Engine()
    return next((finding for event in events if (finding := engine.feed(event)) is not None), None)


def diagnosis(recording: str) -> Finding:
    """Found by the check."""
    found = check([event for event in read_run(RECORDED / recording).events if event.proc.startswith("EngineCore")])
    assert found is not None
    return found
