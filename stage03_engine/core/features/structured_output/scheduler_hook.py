"""Structured output in the scheduler: a request waits for its grammar, moves it on by each token, and ends with it.

A step waits for all grammars together, no longer than `--grammar-budget-seconds`. A token whose grammar has not moved on by then is held
back: to the scheduler it looks as if the step that computes it were still in flight, so the request gets nothing in the next steps. When
the grammar is there, the token comes with the results of the step that runs then. So tokens and ends are the same in any case, and a
recording shows them where they came.

Source: vllm/v1/core/sched/scheduler.py (grammar_bitmask, grammar.accept_tokens; WAITING_FOR_FSM is the request's status there). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.structured_output.manager import Accepted, StructuredOutputManager
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import Extra, ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, FinishReason, TokenLogprobs
from stagetrace import trace

WAIT_SECONDS = 0.02  # a request that arrives during it waits at most this long


class Masks(msgspec.Struct, array_like=True):
    """Of the requests with a grammar that are sampled in a step: the tokens that it allows, one bit for each token id."""

    bits: dict[str, bytes]


MASKS = Extra("structured_output", Masks)


class GrammarSchedulerHook(SchedulerHook):
    """Installed by the first request with `structured_outputs`."""

    def __init__(
        self, scheduler: Scheduler, config: VllmConfig, manager: StructuredOutputManager | None = None
    ) -> None:
        super().__init__(scheduler, config)
        self.manager = manager or StructuredOutputManager(config)
        self._num_requests = 0
        self._compiling: set[str] = set()  # requests whose grammar has never been ready
        self._most_seats = max(1, config.scheduler_config.max_num_seqs // 2)  # of one of several API keys
        self._seated: dict[int | None, set[str]] = {}  # API key -> its requests whose grammar is ready, until they end
        self._seatless: dict[
            int | None, dict[str, Request]
        ] = {}  # API key -> those that lack a seat, the next one first
        self._released: dict[str, None] = {}  # requests that nothing holds back any more
        self._accepted = Accepted(set(), set(), {})
        self._held_back: dict[str, tuple[list[int], list[TokenLogprobs] | None]] = {}  # tokens and their logprobs

    def added(self, request: Request) -> None:
        """Begins to compile its grammar."""
        if request.sampling_params.structured_outputs is not None:
            self._num_requests += 1
            self._compiling.add(request.request_id)
            self.manager.grammar_init(request.request_id, request.sampling_params, request.cache_salt, request.tenant)

    def traced_params(self, request: Request) -> dict[str, Any]:
        """That there is a grammar, but not which."""
        return {} if request.sampling_params.structured_outputs is None else {"grammar": True}

    def poll(self) -> tuple[list[EngineCoreOutput], bool | None]:
        """Ends the requests whose grammar turned out to be impossible. If all others wait for theirs, waits a moment."""
        requests = self.scheduler.requests
        refused = [output for output in self.manager.poll() if output.request_id in requests]
        self.scheduler.finish_requests([output.request_id for output in refused], FinishReason.ERROR)
        self.scheduler.stats.num_deferred = self.manager.num_not_ready
        for request_id in self.manager.take_ready():
            self._give_seat(requests[request_id])
        sit_out = sum(request_id not in self.scheduler.held for request_id in self._held_back)
        if self._released or self.manager.num_known:
            return refused, True
        if not requests or len(self.scheduler.held) + sit_out < len(requests):
            return refused, None
        self.manager.wait(WAIT_SECONDS)
        return refused, False

    def may_look_ahead(self) -> bool:
        """A mask needs every token before it, so not while a request has a grammar."""
        return not self._num_requests

    def holds(self, request: Request) -> bool:
        """Until its grammar is compiled; and one that was preempted, until the token is known that is held back. And then until `released` says so:
        another hook that lets go of it in between must not let it run."""
        request_id = request.request_id
        return request_id in self._compiling or request_id in self._held_back or request_id in self._released

    def released(self) -> Iterable[str]:
        """Those whose grammar is compiled, or has moved on."""
        released, self._released = self._released, {}
        for request_id in released:
            if request_id in self._compiling:
                self._compiling.remove(request_id)
                if trace.on:
                    trace.emit("grammar.ready", req=request_id, step=self.scheduler.step)
        return released

    def _give_seat(self, request: Request) -> None:
        """A request that sits steps out keeps its seat, so those of one of several API keys have half of the seats."""
        key = request.tenant
        seated = self._seated.setdefault(key, set())
        if key is None or len(seated) < self._most_seats:
            seated.add(request.request_id)
            self._released[request.request_id] = None
        else:
            self._seatless.setdefault(key, {})[request.request_id] = request

    def decided(self, output: SchedulerOutput) -> None:
        """The masks of the requests that are sampled in this step."""
        requests = self.scheduler.requests
        sampled = [i for i in output.num_scheduled_tokens if requests[i].num_computed_tokens == requests[i].num_tokens]
        if masks := self.manager.grammar_bitmask(sampled):
            MASKS.put(output.extras, Masks(masks))

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """All grammars move on at the same time. Holds back the tokens whose grammar is late, and gives what was held back."""
        sampled, logprobs = runner_output.sampled_token_ids, runner_output.logprobs
        self._accepted = self.manager.accept_tokens(sampled)
        for request_id in [i for i in sampled if self.manager.is_moving(i)]:
            self._held_back[request_id] = (sampled.pop(request_id), logprobs.pop(request_id, None))
            if trace.on:
                trace.emit("grammar.missed", req=request_id, step=output.step)
        for request_id in sorted(self._accepted.known & self._held_back.keys()):
            sampled[request_id], kept = self._give_back(request_id)
            if kept is not None:
                logprobs[request_id] = kept
        return []

    def _give_back(self, request_id: str) -> tuple[list[int], list[TokenLogprobs] | None]:
        if request_id in self.scheduler.held:
            self._released[request_id] = None
        return self._held_back.pop(request_id)

    def sampled(
        self, request: Request, new: EngineCoreOutput, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> str | None:
        """Ends a request whose grammar failed, or allows nothing more."""
        failed = self._accepted.failed.get(request.request_id)
        if failed is not None:
            new.new_token_ids, new.new_logprobs, new.result = [], None, None
            new.finish_reason, new.stop_reason, new.num_cached_tokens = failed.finish_reason, None, 0
            new.error, new.error_param = failed.error, failed.error_param
            return "grammar"
        if request.request_id in self._accepted.complete and new.finish_reason != FinishReason.STOP:
            new.finish_reason, new.ends_with_text = FinishReason.STOP, True
            return "grammar"
        return None

    def finished(self, request: Request) -> None:
        """Its grammar stays compiled for the next request with the same one."""
        if request.sampling_params.structured_outputs is not None:
            self._num_requests -= 1
            self._compiling.discard(request.request_id)
            self._released.pop(request.request_id, None)
            self._held_back.pop(request.request_id, None)
            self._leave_seat(request)
            self.manager.free(request.request_id)

    def _leave_seat(self, request: Request) -> None:
        """Its seat goes to the next one of its API key."""
        seated, seatless = self._seated.get(request.tenant, set()), self._seatless.get(request.tenant, {})
        seatless.pop(request.request_id, None)
        if request.request_id in seated:
            seated.remove(request.request_id)
            if seatless:
                self._give_seat(seatless.pop(next(iter(seatless))))

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        for request_id, (token_ids, _) in self._held_back.items():
            request = self.scheduler.requests[request_id]
            sits_out = request.status != RequestStatus.RUNNING or request.num_computed_tokens == request.num_tokens
            assert sits_out and token_ids, f"{request_id} does not wait for its token"

    def shutdown(self) -> None:
        """Ends what compiles."""
        self.manager.shutdown()
