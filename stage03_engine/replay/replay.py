"""`stages trace replay RUN`: decide every step of a recording again, without a model, and compare.

The scheduler is a pure function of what goes into it: arrivals, aborts, sampled tokens. A recording holds these, so the scheduler of
this repository reproduces it exactly, and one of your own shows the first step in which it decides otherwise. vLLM has no counterpart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from stage03_engine.config import CacheConfig, SchedulerConfig, VllmConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stage03_engine.plugins import find, keys, wanted
from stage03_engine.replay.recording import OWN_PARAMS, Decision, RecordedHook, RecordedStep, made_up_request
from stage03_engine.replay.report import MANY, Difference, Replayed, facts_that_differ, outcome_in_words
from stagetrace import Event, Recording
from stagetrace.commands.common import add_run
from stagetrace.errors import TraceError
from stagetrace.read.lanes import choose_engine

OWN_ARGS = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "num_blocks", "scheduler_config", "cache_config")
"""What `scheduler.created` tells of every engine."""

Snapshot = tuple[list[tuple[str, RequestStatus, int, int]], int]
"""(request, status, tokens computed, tokens) of everyone, and the free blocks."""


def _own(path: str, flag: str, *args: Any) -> Any:
    """An object of the user's own class. Raises ConfigError."""
    return wanted("engine", "construct", flag)(path, flag, *args)


class Replay:
    """One engine: follows its events one after another, and keeps a scheduler in the same state."""

    def __init__(self, created: Event, scheduler_cls: str | None = None, block_pool_cls: str | None = None) -> None:
        self.result = Replayed(created.proc, created.pid)
        self.requests: dict[str, Request] = {}
        self._last_seq = created.seq
        self._open: dict[int, RecordedStep] = {}  # steps that have begun and not ended
        self._now = 0  # the step whose decision or results were compared last
        self._finished: list[str] = []  # since the last decision
        args = created.args
        self.config = _known(SchedulerConfig, args["scheduler_config"])
        self.cache_config = _known(CacheConfig, args["cache_config"])
        self._created = created
        reference = _reference(args["scheduler_config"].get("scheduler_cls"))
        self._overlap = reference is not Scheduler
        self._stand_ins = keys("replay")  # name in a recording -> what stands for a feature that it shows
        self._hooks: dict[str, RecordedHook] = {}  # name -> those that this recording uses
        size = args["num_blocks"]
        self.pool: BlockPool = _own(block_pool_cls, "--block-pool-cls", size) if block_pool_cls else BlockPool(size)
        given = (self.config, self.cache_config, self.pool, args["max_model_len"], b"")
        self.scheduler: Scheduler = (
            _own(scheduler_cls, "--scheduler-cls", *given) if scheduler_cls else reference(*given)
        )
        self._use_all(args, OWN_ARGS)

    def _use_all(self, told: Mapping[str, Any], own: Collection[str]) -> None:
        """Install what stands for each feature that these arguments show."""
        for name, value in told.items():
            if value and name not in own:
                self._use(name)

    def _use(self, name: str) -> None:
        """Install what stands for one feature, if it is not yet; in the order of features. Raises ConfigError if the feature is not installed."""
        if name in self._hooks:
            return
        kind: type[RecordedHook] = wanted("replay", name, f"{name} (the recording uses it)")
        if kind not in map(type, self._hooks.values()):
            config = VllmConfig(scheduler_config=self.config, cache_config=self.cache_config)
            self._hooks[name] = kind(self.scheduler, config, self._created)
            self.scheduler.hooks = [self._hooks[name] for name in self._stand_ins if name in self._hooks]

    @property
    def done(self) -> bool:
        """Has a difference been found? What comes after it means nothing."""
        return self.result.difference is not None

    def feed(self, event: Event) -> None:
        """The next event of the engine's process. Raises TraceError for what cannot be replayed."""
        if event.seq != self._last_seq + 1:
            raise TraceError(
                f"the recording lacks events of {event.proc} between {event.pid}:{self._last_seq} and {event.ref} "
                "(filtered, sampled, rotated or damaged): only a whole one can be decided again"
            )
        self._last_seq = event.seq
        try:
            self._feed(event)
        except KeyError as error:
            raise TraceError(f"{event.ref} {event.name}: {error} is not in the recording before it") from error

    def _feed(self, event: Event) -> None:
        number = event.step or 0
        if event.name == "engine.step":
            if event.ph == "B":
                self._open[number] = RecordedStep(number)
            elif number in self._open:
                self._replay(number)
        elif event.name == "sched.queued":
            self._arrive(event)
        elif self._open and not (self._overlap and event.args.get("by") == "outside") and event.name != "kv.reset":
            # What names no step belongs to the newest decision.
            self._open.get(number, self._open[max(self._open)]).add(event)
        elif event.name == "sched.finished":
            reason = FinishReason[event.args["reason"].upper()]
            self._call(lambda: self.scheduler.finish_requests([event.req or ""], reason))
            self._ended(event.req or "")
        elif event.name == "kv.reset":
            done = self._call(self.pool.reset)
            if done != event.args["done"] and not self.done:
                self._differ(None, [f"reset of the prefix cache: {event.args['done']}"], [str(done)], self._snapshot())

    def end(self) -> Replayed:
        """The recording is over: a step that was cut off is compared as far as it was recorded."""
        for step in self._open.values():
            self.result.cut_off = self.result.cut_off or step.step
            if step.decided and step.output is None and not self.done:
                self._decide(step, whole=False)
        return self.result

    # What goes in

    def _arrive(self, event: Event) -> None:
        params = event.args["params"]
        self._use_all(params, OWN_PARAMS)
        message = made_up_request(event, self.cache_config)
        for hook in self._hooks.values():
            hook.before_arrival(message, params)
        request = Request(message, seed=0)
        self.requests[request.request_id] = request
        self.result.requests += 1
        self._call(lambda: self.scheduler.add_request(request))

    def _ended(self, request_id: str) -> None:
        del self.requests[request_id]
        self._finished.append(request_id)

    def _call(self, function: Callable[[], Any]) -> Any:
        """Ask the scheduler; an error of its own is a difference."""
        try:
            return function()
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._differ(None, ["the scheduler goes on"], [said], self._snapshot())
            return None

    # One step

    def _replay(self, number: int) -> None:
        """A step has ended. If steps overlap, the next ones had been decided before: the recorded order is kept."""
        for step in self._open.values():
            if step.output is None and not self.done:
                for name in step.events.keys() & self._stand_ins.keys():
                    self._use(name)
                step.output = self._decide(step, whole=step.step == number)
        if not self.done:
            self._update(self._open.pop(number))

    def _update(self, step: RecordedStep) -> None:
        """Give the scheduler what the model had sampled."""
        output = step.output
        assert output is not None, "the decision is the same"
        self._now = step.step
        model = step.runner_output(self.requests, self.cache_config)
        for hook in self._hooks.values():
            hook.before_results(step, model)
        before = self._snapshot()
        outputs = self._call(lambda: self.scheduler.update_from_output(output, model))
        if self.done:
            return
        self._compare_outputs(step, outputs, before)
        for request_id in step.ends:
            self._ended(request_id)
        self.result.steps += 1
        self.result.tokens += sum(step.decision.scheduled.values())

    def _decide(self, step: RecordedStep, whole: bool) -> SchedulerOutput | None:
        """Let the scheduler decide; None when it decides otherwise than recorded."""
        if not step.decided:
            raise TraceError(
                f"step {step.step} has no decision: it was recorded with a scheduler of the user's own that emits no events"
            )
        self._now, before = step.step, self._snapshot()
        for hook in self._hooks.values():
            hook.before_decision(step)
        recorded, recorded.finished, self._finished = step.decision, sorted(self._finished), []
        output: SchedulerOutput | None = self._call(self.scheduler.schedule)
        if output is None:
            if not self.done:
                self._differ(None, ["a decision"], ["schedule() returned None"], before)
            return None
        replayed = Decision.of(output, self.pool.num_free)
        if not whole and recorded.swapped == (0, 0):  # what was swapped is only recorded after the decision
            recorded.swapped = replayed.swapped
        if recorded != replayed or list(recorded.scheduled) != list(replayed.scheduled):
            self._differ(*facts_that_differ(recorded, replayed), before)
            return None
        return output

    def _compare_outputs(self, step: RecordedStep, outputs: list[EngineCoreOutput], before: Snapshot) -> None:
        """Did the same requests end, after as many tokens?"""
        ends = {i: event.args["reason"] for i, event in step.ends.items()}
        recorded = {e.req or "": (e.args["num_tokens"], ends.get(e.req or "")) for e in step.tokens}
        recorded |= {i: (0, ends.get(i)) for i in step.pooled}
        replayed = {}
        for output in outputs:
            reason, count = output.finish_reason, len(output.new_token_ids)
            if reason == FinishReason.ERROR:  # such an output holds no tokens
                count = recorded.get(output.request_id, (0, None))[0]
            replayed[output.request_id] = (count, None if reason is None else str(reason))
        wrong = [i for i in recorded | replayed if recorded.get(i) != replayed.get(i)]
        if wrong:
            facts = [[outcome_in_words(i, side.get(i)) for i in wrong] for side in (recorded, replayed)]
            self._differ(wrong[0], facts[0], facts[1], before)

    def _differ(self, request_id: str | None, recorded: list[str], replayed: list[str], before: Snapshot) -> None:
        self.result.difference = Difference(self._now, request_id, recorded, replayed, self._in_words(before))

    # The state before a decision

    def _snapshot(self) -> Snapshot:
        """Cheap, because it is recorded before every decision; only one is put into words."""
        rows = [(i, r.status, r.num_computed_tokens, r.num_tokens) for i, r in self.requests.items()]
        return rows, self.pool.num_free

    def _in_words(self, snapshot: Snapshot) -> list[str]:
        rows, free = snapshot
        budget, seats = self.config.max_num_batched_tokens, self.config.max_num_seqs
        lines = [f"{free} of {self.pool.num_usable} blocks free; budget {budget} tokens, {seats} requests"]
        for status in RequestStatus:
            named = [f"{i} ({computed} of {total} tokens computed)" for i, s, computed, total in rows if s == status]
            more = f", and {len(named) - MANY} more" if len(named) > MANY else ""
            if named:
                lines.append(f"{status.name.lower()}: {', '.join(named[:MANY])}{more}")
        return lines


def _reference(recorded: str | None) -> type[Scheduler]:
    """The scheduler of a feature that the recording is of, whose steps overlap; the walk's if it is of that, or of a user's own. Raises
    ConfigError if the feature is not installed."""
    if recorded in (None, f"{Scheduler.__module__}:{Scheduler.__name__}"):
        return Scheduler
    if recorded.startswith(__name__.partition(".")[0] + "."):
        return wanted("replay", recorded, f"{recorded} (the recording uses it)")
    return find("replay", recorded) or Scheduler


def _known(kind: type[Any], settings: dict[str, Any]) -> Any:
    """A section of the configuration, without the settings of features that are not installed."""
    return kind(**{field.name: settings[field.name] for field in fields(kind) if field.name in settings})


def replay(
    directory: str | Path,
    scheduler_cls: str | None = None,
    block_pool_cls: str | None = None,
    engine: int | None = None,
) -> list[Replayed]:
    """Decide a recording again, with the reference classes or with those that `module:Class` names; one result per engine, each by
    itself. `engine`: only the one of this number, with all that came after it under the same number.

    Raises FileNotFoundError when there is no recording, TraceError when it cannot be replayed, ConfigError for a class that
    cannot be made.
    """
    headers: dict[int, Event] = {}
    engines: dict[int, Replay] = {}
    names: dict[int, str] = {}
    results: list[Replayed] = []
    for event in Recording(directory):
        if event.name == "run.start":
            headers[event.pid] = event
        elif event.name == "scheduler.created":
            left_out = headers[event.pid].args.get("filter") if event.pid in headers else None
            if left_out:
                raise TraceError(
                    f"{event.proc} recorded only some events ({left_out}): record without filters to replay"
                )
            names[event.pid] = event.proc
            if event.pid in engines:  # one process, one engine after another
                results.append(engines[event.pid].end())
            engines[event.pid] = Replay(event, scheduler_cls, block_pool_cls)
        elif event.pid in engines:
            if not engines[event.pid].done:
                engines[event.pid].feed(event)
        elif event.name.startswith("sched."):
            raise TraceError(
                f"the recording of {event.proc} does not begin with its scheduler (no scheduler.created: rotated away or "
                "filtered), so its decisions cannot be made again"
            )
    if not engines:
        raise TraceError(f"no engine's scheduler was recorded in {directory}: there is nothing to decide again")
    results += [each.end() for each in engines.values()]
    if engine is not None:
        chosen = choose_engine(names.items(), engine)
        results = [result for result in results if result.pid in chosen]
    return sorted(results, key=lambda result: result.proc)  # stable: one that was started again comes after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, and whose classes decide."""
    add_run(parser)
    parser.add_argument(
        "--scheduler-cls", metavar="MODULE:CLASS", help="decide with this class, not the reference scheduler"
    )
    parser.add_argument("--block-pool-cls", metavar="MODULE:CLASS", help="hand out blocks with this class")
    parser.add_argument(
        "--engine", metavar="N", type=int, help="of several engines only this one (default: one after the other)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the result; 1 when a decision differs."""
    results = replay(args.run, args.scheduler_cls, args.block_pool_cls, args.engine)
    for result in results:
        print(result)
    return int(any(result.difference for result in results))
