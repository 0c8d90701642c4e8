"""Engines without a model that leave a trace, healthy ones and ones with a planted bug, for the judge of exercise 13.

Do not read this before you have done that exercise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from scheduler_load import Load, make, name, request as request_of, sampled

from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import FinishReason
from stagetrace import trace
from stagetrace.event import Event, decode_line, encode_line
from stagetrace.vocabulary import VOCABULARY


class BehindTheOthers(Scheduler):
    """order: whoever is preempted counts as newly arrived."""

    def _preempt(self, request: Request, output: SchedulerOutput, needed_by: Request) -> None:
        request.arrival = next(self._arrivals)
        super()._preempt(request, output, needed_by)


class NewestFirst(Scheduler):
    """order: newcomers go first."""

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        self.waiting.reverse()
        super()._schedule_waiting(output, budget)
        self.waiting.sort(key=lambda request: request.arrival)


class LastPreemptedFirst(Scheduler):
    """order: of those who were preempted, the newest resumes first."""

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        self.waiting.sort(
            key=lambda request: (not request.num_preemptions, -request.arrival * bool(request.num_preemptions))
        )
        super()._schedule_waiting(output, budget)
        self.waiting.sort(key=lambda request: request.arrival)


class AbortsLeak(Scheduler):
    """blocks: whoever is aborted keeps them."""

    def _finish(self, request: Request, reason: FinishReason, by: str) -> None:
        if by == "outside":
            self.kv_cache_manager.tables.pop(request.request_id, None)
        super()._finish(request, reason, by)


class LastBlockLeaks(Scheduler):
    """blocks: the last one is forgotten at the end."""

    def _finish(self, request: Request, reason: FinishReason, by: str) -> None:
        table = self.kv_cache_manager.tables.get(request.request_id, [])
        del table[-1:]
        super()._finish(request, reason, by)


class HitsLeak(Scheduler):
    """blocks: the first of the prefix cache is never given back."""

    def _finish(self, request: Request, reason: FinishReason, by: str) -> None:
        if request.num_cached_tokens:
            del self.kv_cache_manager.tables.get(request.request_id, [])[:1]
        super()._finish(request, reason, by)


class PreemptionLeaks(Scheduler):
    """blocks: whoever is preempted keeps the first one."""

    def _preempt(self, request: Request, output: SchedulerOutput, needed_by: Request) -> None:
        del self.kv_cache_manager.tables[request.request_id][:1]
        super()._preempt(request, output, needed_by)


class InOrder(Scheduler):
    """Serves the running requests in another order."""

    def order(self, requests: list[Request]) -> list[Request]:
        return requests

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        for request in self.order(list(self.running)):
            if request.status == RequestStatus.RUNNING and budget > 0:
                num_tokens = self._limited(request.num_tokens - request.num_computed_tokens, budget)
                new_blocks = self._make_room(request, num_tokens, output)
                if new_blocks is not None:
                    output.new_block_ids[request.request_id] = new_blocks
                    budget = self._give(request, num_tokens, new_blocks, output, budget)
        return budget

    def _make_room(self, request: Request, num_tokens: int, output: SchedulerOutput) -> list[int] | None:
        """Blocks for the request; whoever is preempted for it has no tokens in this step yet."""
        while True:
            new_blocks = self.kv_cache_manager.allocate_slots(request, request.num_computed_tokens + num_tokens)
            others = [each for each in self.running if each.request_id not in output.num_scheduled_tokens]
            others = [each for each in others if each is not request]
            if new_blocks is not None or not others:
                return new_blocks
            self.running.remove(others[-1])
            self._preempt(others[-1], output, request)


class LongestFirst(InOrder):
    """turn: who lacks most goes first."""

    def order(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda each: each.num_computed_tokens - each.num_tokens)


class DecodesWait(InOrder):
    """turn: nobody decodes while a prompt is computed."""

    def order(self, requests: list[Request]) -> list[Request]:
        prompts = [each for each in requests if each.num_computed_tokens < each.num_prompt_tokens]
        return prompts or requests


class SkipsTheSecond(InOrder):
    """turn: of three or more, the second one waits."""

    def order(self, requests: list[Request]) -> list[Request]:
        return requests[:1] + requests[2:] if len(requests) > 2 else requests


class TwoBudgets(Scheduler):
    """budget: one for those who run, one for those who wait."""

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        super()._schedule_running(output, budget)
        return budget


LONGEST = 60  # steps: an engine whose blocks are lost may never end

BROKEN: dict[str, tuple[type[Scheduler], ...]] = {
    "order": (BehindTheOthers, NewestFirst, LastPreemptedFirst),
    "turn": (LongestFirst, DecodesWait, SkipsTheSecond),
    "blocks": (AbortsLeak, LastBlockLeaks, PreemptionLeaks, HitsLeak),
    "budget": (TwoBudgets,),
}
"""Rule -> engines that break it, sooner or later, if the load gives occasion to."""


@dataclass(frozen=True)
class Aborts:
    """Requests that are aborted (their numbers), each behind a step."""

    behind: tuple[tuple[int, int], ...] = ()

    def __repr__(self) -> str:
        return ", ".join(f"{name(number)} is aborted behind step {step}" for number, step in self.behind) or "none"


def trace_of(scheduler_class: type[Scheduler], load: Load, aborts: Aborts) -> list[Event]:
    """The events of an engine with this scheduler that serves the load, as a recording would hold them."""
    events: list[Event] = []
    numbers = count(1)

    def watcher(event: Event) -> None:
        event.seq = next(numbers)
        events.append(decode_line(encode_line(event)))

    trace.watch(watcher, VOCABULARY)
    try:
        _live(make(scheduler_class, load), load, aborts)
    finally:
        trace.watch(None)
    return events


def _live(scheduler: Any, load: Load, aborts: Aborts) -> None:
    coming = list(enumerate(load.arrivals))
    for step in _steps(scheduler):
        while coming and coming[0][1].step <= step:
            scheduler.add_request(request_of(*coming.pop(0)))
        if not scheduler.has_unfinished_requests and not coming:
            return
        if scheduler.has_unfinished_requests:
            output = scheduler.schedule()
            scheduler.update_from_output(output, sampled(scheduler, output))
        scheduler.finish_requests([name(number) for number, behind in aborts.behind if behind == step])


def _steps(scheduler: Any) -> Iterator[int]:
    """Step numbers, each inside its span."""
    for step in range(LONGEST):
        state = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
        if trace.on:
            trace.emit("engine.step", ph="B", step=step + 1, **state)
        yield step
        if trace.on:
            trace.emit("engine.step", ph="E", step=step + 1, **state)
