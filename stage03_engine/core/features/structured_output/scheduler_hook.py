"""Structured output in the scheduler: a request waits for its grammar, moves it on by each token, and ends with it.

A step waits for all grammars together, no longer than `--grammar-budget-seconds`. A token whose grammar has not moved on by then is held
back: to the scheduler it looks as if the step that computes it were still in flight, so the request gets nothing in the next steps. When
the grammar is there, the token comes with the results of the step that runs then. So tokens and ends are the same in any case, and a
recording shows them where they came.

Source: vllm/v1/core/sched/scheduler.py (WAITING_FOR_FSM, grammar_bitmask, grammar.accept_tokens). Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.structured_output.manager import Accepted, StructuredOutputManager
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, FinishReason, TokenLogprobs
from stagetrace import trace

WAIT_SECONDS = 0.02  # a request that arrives during it waits at most this long


class GrammarSchedulerHook(SchedulerHook):
    """Installed by the first request with `structured_outputs`."""

    def __init__(
        self, scheduler: Scheduler, config: VllmConfig, manager: StructuredOutputManager | None = None
    ) -> None:
        super().__init__(scheduler, config)
        self.manager = manager or StructuredOutputManager(config)
        self._num_requests = 0
        self._most_seats = max(1, config.scheduler_config.max_num_seqs // 2)  # of one of several API keys
        self._seats: Counter[int | None] = (
            Counter()
        )  # API key -> its requests whose grammar is ready, and that have not ended
        self._seated: set[str] = set()
        self._seatless: set[str] = set()  # requests whose grammar is ready, and that wait for a seat of their key
        self._accepted = Accepted(set(), set(), {})
        self._held_back: dict[str, tuple[list[int], list[TokenLogprobs] | None]] = {}  # tokens and their logprobs

    def added(self, request: Request) -> None:
        """Begins to compile its grammar."""
        if request.sampling_params.structured_outputs is not None:
            self._num_requests += 1
            request.status = RequestStatus.WAITING_FOR_FSM
            self.manager.grammar_init(request.request_id, request.sampling_params, request.cache_salt, request.tenant)

    def traced_params(self, request: Request) -> dict[str, Any]:
        """That there is a grammar, but not which."""
        return {} if request.sampling_params.structured_outputs is None else {"grammar": True}

    def poll(self) -> tuple[list[EngineCoreOutput], bool]:
        """Ends the requests whose grammar turned out to be impossible. If all others wait for theirs, waits a moment."""
        requests = self.scheduler.requests
        refused = [output for output in self.manager.poll() if output.request_id in requests]
        self.scheduler.finish_requests([output.request_id for output in refused], FinishReason.ERROR)
        self.scheduler.stats.num_deferred = self.manager.num_not_ready
        waiting = (
            self.scheduler.stats.num_deferred + len(self._held_back) - self.manager.num_known + len(self._seatless)
        )
        blocked = waiting == len(requests)
        if blocked:
            self.manager.wait(WAIT_SECONDS)
        return refused, not blocked

    def may_look_ahead(self) -> bool:
        """A mask needs every token before it, so not while a request has a grammar."""
        return not self._num_requests

    def is_ready(self, request: Request) -> bool:
        """Is its grammar compiled? Then it waits like all others; but a request that sits steps out keeps its seat, so those of one of several
        API keys have half of the seats. One that was preempted waits for a token that is held back."""
        if request.status != RequestStatus.WAITING_FOR_FSM:
            return request.request_id not in self._held_back
        if not self.manager.is_ready(request.request_id):
            return False
        if request.tenant is not None and self._seats[request.tenant] >= self._most_seats:
            self._seatless.add(request.request_id)
            return False
        self._seats[request.tenant] += 1
        self._seated.add(request.request_id)
        self._seatless.discard(request.request_id)
        request.status = RequestStatus.WAITING
        if trace.on:
            trace.emit("grammar.ready", req=request.request_id, step=self.scheduler.step)
        return True

    def decided(self, output: SchedulerOutput) -> None:
        """The masks of the requests that are sampled in this step."""
        requests = self.scheduler.requests
        sampled = [i for i in output.num_scheduled_tokens if requests[i].num_computed_tokens == requests[i].num_tokens]
        output.grammar_bitmask = self.manager.grammar_bitmask(sampled)

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """All grammars move on at the same time. Holds back the tokens whose grammar is late, and gives what was held back."""
        sampled, logprobs = runner_output.sampled_token_ids, runner_output.logprobs
        self._accepted = self.manager.accept_tokens(sampled)
        for request_id in [i for i in sampled if self.manager.is_moving(i)]:
            self._held_back[request_id] = (sampled.pop(request_id), logprobs.pop(request_id, None))
            if trace.on:
                trace.emit("grammar.missed", req=request_id, step=output.step)
        for request_id in sorted(self._accepted.known & self._held_back.keys()):
            sampled[request_id], kept = self._held_back.pop(request_id)
            if kept is not None:
                logprobs[request_id] = kept
        return []

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
            new.finish_reason, new.ended_by_grammar = FinishReason.STOP, True
            return "grammar"
        return None

    def finished(self, request: Request) -> None:
        """Its grammar stays compiled for the next request with the same one."""
        if request.sampling_params.structured_outputs is not None:
            self._num_requests -= 1
            self._seatless.clear()  # there is a seat now: each is asked again
            if request.request_id in self._seated:
                self._seated.remove(request.request_id)
                self._seats[request.tenant] -= 1
            self._held_back.pop(request.request_id, None)
            self.manager.free(request.request_id)

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        for request_id, (token_ids, _) in self._held_back.items():
            request = self.scheduler.requests[request_id]
            sits_out = request.status != RequestStatus.RUNNING or request.num_computed_tokens == request.num_tokens
            assert sits_out and token_ids, f"{request_id} does not wait for its token"

    def shutdown(self) -> None:
        """Ends what compiles."""
        self.manager.shutdown()
