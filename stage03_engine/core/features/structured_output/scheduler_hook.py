"""Structured output in the scheduler: a request waits for its grammar, moves it on by each token, and ends with it.

Source: vllm/v1/core/sched/scheduler.py (WAITING_FOR_FSM, grammar_bitmask, grammar.accept_tokens). Imports no torch.
"""

from __future__ import annotations

from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.structured_output.manager import StructuredOutputManager
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stagetrace import trace

WAIT_SECONDS = 0.02  # a request that arrives during it waits at most this long


class GrammarSchedulerHook(SchedulerHook):
    """Installed by the first request with `structured_outputs`."""

    def __init__(
        self, scheduler: Scheduler, config: VllmConfig, manager: StructuredOutputManager | None = None
    ) -> None:
        super().__init__(scheduler, config)
        self.manager = manager or StructuredOutputManager(config)
        self._complete: set[str] = set()
        self._failed: dict[str, EngineCoreOutput] = {}

    def added(self, request: Request) -> None:
        """Begins to compile its grammar."""
        if request.sampling_params.structured_outputs is not None:
            request.status = RequestStatus.WAITING_FOR_FSM
            self.manager.grammar_init(request.request_id, request.sampling_params, request.cache_salt)

    def traced_params(self, request: Request) -> dict[str, Any]:
        """That there is a grammar, but not which."""
        return {} if request.sampling_params.structured_outputs is None else {"grammar": True}

    def poll(self) -> tuple[list[EngineCoreOutput], bool]:
        """Ends the requests whose grammar turned out to be impossible. If all others still compile, waits a moment."""
        requests = self.scheduler.requests
        refused = [output for output in self.manager.poll() if output.request_id in requests]
        self.scheduler.finish_requests([output.request_id for output in refused], FinishReason.ERROR)
        self.scheduler.stats.num_deferred = self.manager.num_not_ready
        blocked = self.scheduler.stats.num_deferred == len(requests)
        if blocked:
            self.manager.wait(WAIT_SECONDS)
        return refused, not blocked

    def may_look_ahead(self) -> bool:
        """A mask needs every token before it, so not while a request has a grammar."""
        return not any(request.sampling_params.structured_outputs for request in self.scheduler.requests.values())

    def is_ready(self, request: Request) -> bool:
        """Is its grammar compiled? Then it waits like all others."""
        if request.status != RequestStatus.WAITING_FOR_FSM:
            return True
        if not self.manager.is_ready(request.request_id):
            return False
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
        """All grammars move on at the same time."""
        self._complete, self._failed = self.manager.accept_tokens(runner_output.sampled_token_ids)
        return []

    def sampled(
        self, request: Request, new: EngineCoreOutput, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> str | None:
        """Ends a request whose grammar failed, or allows nothing more."""
        failed = self._failed.get(request.request_id)
        if failed is not None:
            new.new_token_ids, new.new_logprobs, new.result = [], None, None
            new.finish_reason, new.stop_reason, new.num_cached_tokens = failed.finish_reason, None, 0
            new.error, new.error_param = failed.error, failed.error_param
            return "grammar"
        if request.request_id in self._complete and new.finish_reason != FinishReason.STOP:
            new.finish_reason, new.ended_by_grammar = FinishReason.STOP, True
            return "grammar"
        return None

    def finished(self, request: Request) -> None:
        """Its grammar stays compiled for the next request with the same one."""
        self.manager.free(request.request_id)

    def shutdown(self) -> None:
        """Ends what compiles."""
        self.manager.shutdown()
