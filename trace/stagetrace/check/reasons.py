"""Why a request got in a step what it got: the scheduler's events, as sentences with their numbers.

`explain(directory, part)` follows one request through a recording and gives a `StepReasons` for each step of its life in the engine;
`explain_all(events)` does so for every request of one engine whose events are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stagetrace.check.reason_words import (
    CODE,
    count,
    ended,
    engine_lost,
    held_back,
    preempted,
    routed,
    scheduled,
    token_chances,
    turn,
    waited_for,
    worker_time,
)
from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.ids import root_of
from stagetrace.read.engine_state import EngineState, RequestState
from stagetrace.read.lanes import WorkerTimes
from stagetrace.read.reader import Recording
from stagetrace.read.terminal import milliseconds

MANY = 10  # ids that an error lists


@dataclass
class Reason:
    """One sentence, and the rule behind it: a key of `reason_words.CODE`."""

    rule: str
    text: str
    short: str  # for summaries: the same in all steps that are merged

    @property
    def places(self) -> str:
        """Where the rule is, here and in vLLM."""
        here, vllm = CODE[self.rule]
        return f"{here}; in vLLM: {vllm}"


@dataclass
class StepReasons:
    """What happened to the request in one step."""

    step: int  # 0: before it was in an engine, or between two engines
    before: list[str]  # the state of the engine when the step began
    reasons: list[Reason] = field(default_factory=list)
    engine: int = 0  # pid
    process: str = ""  # its name


def find_request(directory: str | Path, part: str) -> str:
    """The request id of an engine that is, or else contains, `part`. Raises TraceError with the candidates."""
    ids = dict.fromkeys(e.req for e in Recording(directory) if e.name == "sched.queued" and e.req is not None)
    found = [part] if part in ids else [i for i in ids if part in i]
    if len(found) == 1:
        return found[0]
    some = ", ".join((found or list(ids))[:MANY]) + (", ..." if len(found or ids) > MANY else "")
    if not found and (refused := _never_queued(directory, part)):
        raise TraceError(
            f"{refused} was refused before it was queued in an engine, so no step knows it; `show --req` has its story"
        )
    if not ids:
        raise TraceError(f"no request was queued in an engine in {directory}")
    if not found:
        raise TraceError(f"no request id contains {part!r}; there are {some}")
    raise TraceError(f"{part!r} is part of {len(found)} request ids: {some}; give more of it")


def _never_queued(directory: str | Path, part: str) -> str | None:
    """A request like this that was answered with an error object."""
    refused = (e.req for e in Recording(directory) if e.name == "request.refused" and e.req is not None)
    return next((req for req in refused if part in req), None)


def explain(directory: str | Path, request_id: str) -> Iterator[StepReasons]:
    """One item for each step from the arrival of a request to its end, in order; with several engines also for where it was sent, and for
    the death of an engine that had it."""
    engines: dict[int, _Engine] = {}
    number: int | None = None  # with several engines: the one that has it
    for event in Recording(directory):
        if event.name == "scheduler.created":
            engines[event.pid] = _Engine(request_id, event.proc)
        engine = engines.get(event.pid)
        if engine is not None:
            done = engine.feed(event)
            if done is not None:
                yield replace(done, engine=event.pid, process=event.proc)
        elif event.name == "dp.routed" and event.req == request_id:
            again, number = event.args["again"], event.args["engine"]
            short = f"sent to engine {number}{', to begin again' if again else ''}"
            yield StepReasons(0, [], [Reason("routed", routed(event.args), short)])
        elif event.name == "dp.engine_lost" and number is not None and event.args["engine"] == number:
            yield from _broken_off(engines)
            yield StepReasons(0, [], [Reason("engine lost", engine_lost(event.args), f"engine {number} died")])
        elif number is not None and event.req == request_id and event.name in ("request.finished", "request.aborted"):
            number = None
    yield from _broken_off(engines)


def explain_all(events: Iterable[Event]) -> dict[str, list[StepReasons]]:
    """Request -> its steps, in order, from the events of one engine. Each event is looked at by those that it may concern."""
    state, cached_by = EngineState(), dict[int, tuple[str, int]]()
    followers: dict[str, _Engine] = {}
    found: dict[str, list[StepReasons]] = {}
    for event in events:
        request_id = event.req or ""
        if event.name == "sched.queued":
            followers[request_id] = _Engine(request_id, event.proc, state, cached_by)
            found.setdefault(request_id, [])
        for_all = event.req is None or event.name == "sched.preempt"  # the reasons of others name who was preempted
        for follower in followers.values() if for_all else filter(None, [followers.get(request_id)]):
            done = follower.follow(event)
            if done is not None:
                found[follower.request_id].append(done)
        state.feed(event)
        if event.name == "engine.step" and event.ph == "E":
            followers = {name: each for name, each in followers.items() if name in state.requests}
    for follower in followers.values():
        found[follower.request_id] += [step for step in follower.open.values() if step.reasons]
    return found


def _broken_off(engines: dict[int, _Engine]) -> Iterator[StepReasons]:
    """Steps that concerned the request and that no engine ended: the recording ends within them, or the engine died."""
    for pid, engine in engines.items():
        steps, engine.open = engine.open, {}
        yield from (replace(step, engine=pid, process=engine.process) for step in steps.values() if step.reasons)


def time_of_step(directory: str | Path, engine: int, step: int) -> list[str]:
    """What the workers of an engine (its pid) did in a step, as sentences: none if the engine is its own worker."""
    times, begun, took = WorkerTimes((engine, step)), 0, 0
    for event in Recording(directory):
        times.feed(event)
        if event.name == "engine.step" and (event.pid, event.step) == (engine, step):
            begun, took = (event.ts, 0) if event.ph == "B" else (begun, event.ts - begun)
    workers = sorted(times.of_worker.values(), key=lambda time: time.lane)
    if not workers:
        return []
    whole = [f"The step took {milliseconds(took)} ms."] if took else []
    return [*whole, *map(worker_time, workers), *waited_for(workers)]


def chances_of_step(directory: str | Path, request_id: str, engine: int, step: int) -> list[str]:
    """What else each token of the request could have been that an engine (its pid) chose in a step, as sentences: none if the client asked
    for no logprobs, or what it was told was not recorded. A token that is computed again, because its engine died, came with the first."""
    came: list[tuple[int, int]] = []  # of each token: engine, step
    chances: dict[int, list[list[Any]]] = {}  # token -> [text, probability] of the chosen one, then of the likely ones
    for event in Recording(directory):
        if event.req != request_id:
            continue
        if event.name == "sched.token":
            came += [(event.pid, event.step or 0)] * (event.args["num_output_tokens"] - len(came))
        elif event.name == "answer.logprobs":
            chances.update(enumerate(event.args["chances"], event.args["first"]))
    own = (place for place, where in enumerate(came) if where == (engine, step) and place in chances)
    return [token_chances(place + 1, *chances[place]) for place in own]


def _ends(step: StepReasons) -> bool:
    return any(reason.rule.startswith("end ") for reason in step.reasons)


class _Engine:
    """Follows one request through one engine. Several may share `state` and `cached_by`: whoever shares them feeds the state, after
    `follow`."""

    def __init__(
        self,
        request_id: str,
        process: str,
        state: EngineState | None = None,
        cached_by: dict[int, tuple[str, int]] | None = None,
    ) -> None:
        self.request_id, self.process = request_id, process
        self.state = EngineState() if state is None else state
        self.open: dict[int, StepReasons] = {}  # steps in progress that may concern it; at most two
        self._at = StepReasons(0, [])  # the one that the event belongs to
        # block -> (who filled it, in which step)
        self._cached_by: dict[int, tuple[str, int]] = {} if cached_by is None else cached_by
        self._before: RequestState | None = None  # the request when the step began
        self._num_hits = 0  # blocks that it found in the prefix cache in this step
        self._preempted: list[str] = []  # in this step
        self._reads = False  # a KV connector is asked

    def feed(self, event: Event) -> StepReasons | None:
        """Process the next event; return a step when it is over, if it concerned the request."""
        done = self.follow(event)
        self.state.feed(event)
        return done

    def follow(self, event: Event) -> StepReasons | None:
        """As `feed`, before the state has changed."""
        done = None
        if event.name == "engine.step" and event.ph == "B":
            self._begin(event.step or 0)
        elif event.name == "engine.step":
            step = self.open.pop(event.step or 0, None)
            done = step if step is not None and step.reasons else None
            if done is not None and self.request_id not in self.state.requests and not _ends(done):
                self._dropped(done)
        elif event.name == "sched.finished" and event.req == self.request_id and not self.open:  # between two steps
            self._at = done = StepReasons(self.state.step, self.state.in_words())
            self._mine(event.name, event.args)
        else:
            self._event(event)
        return done

    def _begin(self, step: int) -> None:
        request = self.state.requests.get(self.request_id)
        self._num_hits, self._preempted = 0, []
        self._before = replace(request) if request is not None else None
        if request is not None:
            self.open[step] = StepReasons(step, self.state.in_words())

    def _event(self, event: Event) -> None:
        if event.name == "kv.cached":
            for block in event.args["blocks"]:
                self._cached_by[block] = (event.req or "", self.state.step)
        elif event.name == "sched.preempt":
            self._preempted.append(event.req or "")
        if not self.open:
            return
        self._at = self.open.get(event.step or 0, self.open[max(self.open)])
        if event.name == "sched.held_back":
            self._held_back(event.args)
        elif event.name == "sched.output" and not self._at.reasons:
            self._passed_over(event.args)
        elif event.req == self.request_id:
            self._mine(event.name, event.args)

    def _say(self, rule: str, text: str, short: str) -> None:
        self._at.reasons.append(Reason(rule, text, short))

    def _dropped(self, step: StepReasons) -> None:
        self._at = step
        text = "It had ended before this step did, so what this step computed for it was dropped."
        self._say("dropped", text, "dropped: it had ended")

    def _request(self) -> RequestState:
        return self.state.requests[self.request_id]

    def _held_back(self, args: dict[str, Any]) -> None:
        mine = self.request_id
        if mine in args["held"] and self._reads:
            self._say(
                "connector",
                "It waits until the KV connector knows which of its blocks are kept outside of the cache; those behind it do not.",
                "waits: connector",
            )
            return
        if mine in args["held"]:
            self._say(
                "grammar",
                "It waits for its grammar, which is not compiled yet, or has not moved on by its last token; those behind it do not.",
                "waits: grammar",
            )
            return
        if mine != args["first"] and mine not in args["behind"]:
            return
        first = self.state.requests.get(args["first"] or "")
        text = held_back(args, first, self.state.settings, self._preempted)
        if mine == args["first"]:
            self._say(args["rule"], f"It waits, first in the queue: {text}", f"waits: {args['rule']}")
            return
        place = args["behind"].index(mine) + 2
        order = "nobody overtakes"
        if self.state.settings.get("scheduler_config", {}).get("scheduling_policy") == "fair":
            order = f"HTTP requests take turns, and it is now that of {root_of(args['first'])}"
        text = (
            f"It waits, number {place} in the queue, behind {args['first']}; {order}. Why {args['first']} waits: {text}"
        )
        self._say("order", text, f"waits behind {args['first']}: {args['rule']}")

    def _passed_over(self, args: dict[str, Any]) -> None:
        request = self._before
        if request is not None and request.status == "running":
            if request.computed >= request.total:
                text = (
                    "It runs, and sits out: its last token is still in flight, or its grammar has not moved on by it."
                )
                self._say("last token", text, "runs, gets nothing: last token")
                return
            text = f"It runs, but those before it took all {args['budget']} tokens of the budget."
            self._say("budget of running", text, "runs, gets nothing: budget")

    def _mine(self, name: str, args: dict[str, Any]) -> None:
        settings = self.state.settings
        match name:
            case "sched.queued":
                self._reads = bool(args["params"].get("kv_transfer"))
            case "kv_transfer.asked":
                self._reads = True
            case "kv_transfer.found":
                self._reads = False
                num_blocks, first = args["num_blocks"], args["first"]
                has = f"{count(num_blocks, 'block')} of it, from number {first} on" if num_blocks else "no block of it"
                text = f"The KV connector has {has}. It may be admitted; what the prefix cache lacks is copied into it."
                self._say("connector", text, "blocks found" if num_blocks else "no block found")
            case "grammar.ready":
                self._say("grammar", "Its grammar is compiled: it may be admitted.", "grammar ready")
            case "grammar.missed":
                text = "The budget of this step for grammars was over before its own had moved on, so its token comes in a later step."
                self._say("grammar late", text, "sits out: grammar")
            case "sched.prefix_hit":
                self._prefix_hit(args)
            case "sched.admit":
                self._say("admit", "It was admitted: budget, batch and blocks were enough.", "admitted")
            case "sched.turn":
                self._say("turn", turn(args), "in turn")
            case "sched.resume":
                self._say("resume", self._resumed(), "resumed")
            case "sched.scheduled":
                newest = args["missing"] == 1 and args["num_computed"] >= self._request().prompt
                kind = "decode" if newest else "prefill"
                self._say("chunk", scheduled(args, settings, self._num_hits), f"{kind} of {args['num_tokens']}")
            case "encoder.scheduled":
                text = f"It reaches image {args['image'] + 1}: the encoder computes the vectors of its {args['tokens']} places before the model runs."
                self._say("encoder", text, f"encodes image {args['image'] + 1}")
            case "encoder.no_room":
                text = f"For image {args['image'] + 1} the encoder has no room beside {args['needed']} that are still needed: it gets the tokens in front of it at most."
                self._say("hooks", text, f"no room for image {args['image'] + 1}")
            case "spec.scheduled":
                text = f"{args['num_tokens']} drafts are verified beside it, from what budget and free blocks had left."
                self._say("drafts", text, "drafts")
            case "spec.verified":
                text = f"The model accepted {args['accepted']} of {args['drafted']} drafts."
                self._say("verify", text, "verified")
            case "sched.preempt":
                self._say("preempt", preempted(args, self.state, self.request_id), "preempted")
            case "sched.finished":
                self._say("end " + args["by"], ended(args, self._request(), settings), f"ended: {args['by']}")

    def _resumed(self) -> str:
        request = self._request()
        if request.computed:
            return f"It came back: {request.computed} of its tokens lie in CPU memory and are copied back."
        return f"It came back: its {request.total} tokens are computed again, but for those in the prefix cache."

    def _prefix_hit(self, args: dict[str, Any]) -> None:
        self._num_hits = len(args["blocks"])
        by: dict[tuple[str, int], list[int]] = {}
        for block in args["blocks"]:
            by.setdefault(self._cached_by.get(block, ("an unknown request", 0)), []).append(block)
        whose = "; ".join(f"{blocks}, cached by {who} in step {step}" for (who, step), blocks in by.items())
        found = f"{count(args['num_tokens'], 'token')} of it ({count(self._num_hits, 'full block')})"
        self._say("prefix", f"The first {found} were found in the prefix cache: {whose}.", "prefix hit")
