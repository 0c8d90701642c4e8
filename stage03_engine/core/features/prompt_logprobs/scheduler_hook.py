"""Log-probabilities of prompts in the scheduler: collected over the steps of a prompt, given with the first token. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import Extra, ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, TokenLogprobs


class Found(msgspec.Struct, array_like=True):
    """Of some of a prompt's tokens: how many tokens of the prompt come before them, and an entry for each that they predict."""

    start: int
    entries: list[TokenLogprobs]


FOUND = Extra("prompt_logprobs", Found)


class PromptLogprobsSchedulerHook(SchedulerHook):
    """Installed by the first request with `prompt_logprobs`."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        # One entry per prompt token but the first, as steps compute them.
        self._collected: dict[str, list[TokenLogprobs]] = {}

    def added(self, request: Request) -> None:
        """All positions of its prompt must be computed: the prefix cache has keys and values, but no logits."""
        if request.sampling_params.prompt_logprobs is not None:
            self._collected[request.request_id] = []
            request.skip_reading_prefix_cache = request.num_prompt_tokens > 1

    def traced_params(self, request: Request) -> dict[str, Any]:
        """That they are asked for."""
        return {} if request.sampling_params.prompt_logprobs is None else {"prompt_logprobs": True}

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Keep what the step computed, after `start` others. After a preemption a step computes some of them again."""
        for request_id, results in runner_output.results.items():
            known, found = self._collected.get(request_id), FOUND.of(results)
            if known is not None and found is not None:
                known += found.entries[len(known) - found.start :]
                request = self.scheduler.requests[request_id]
                request.skip_reading_prefix_cache = len(known) < request.num_prompt_tokens - 1
        return []

    def sampled(
        self, request: Request, new: EngineCoreOutput, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> str | None:
        """All of them, with the first token."""
        entries = self._collected.pop(request.request_id, None)
        if entries is not None:
            assert len(entries) == request.num_prompt_tokens - 1, "a position of the prompt was skipped"
            new.result = {**(new.result or {}), "prompt_logprobs": entries}
        return None

    def finished(self, request: Request) -> None:
        """Forget what is no longer needed."""
        self._collected.pop(request.request_id, None)
