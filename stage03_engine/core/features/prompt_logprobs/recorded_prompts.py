"""Prompt logprobs in a replay: which positions a step gives depends on nothing but what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stage03_engine.core.features.prompt_logprobs.scheduler_hook import FOUND, Found, PromptLogprobsSchedulerHook
from stage03_engine.core.sched_output import ModelRunnerOutput
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.replay.recording import RecordedHook, RecordedStep

_NO_LOGPROBS = TokenLogprobs([], [], 0)


class RecordedPromptLogprobsHook(RecordedHook, PromptLogprobsSchedulerHook):
    """The scheduler hook of prompt logprobs, over a recording."""

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """Are they asked for?"""
        if params.get("prompt_logprobs"):
            message.sampling_params = msgspec.structs.replace(message.sampling_params, prompt_logprobs=0)

    def before_results(self, step: RecordedStep, results: ModelRunnerOutput) -> None:
        """As many entries as the step computed of each prompt."""
        for request_id, count in step.decision.scheduled.items():
            request, first = self.scheduler.requests.get(request_id), step.computed[request_id]
            if request is None or request.sampling_params.prompt_logprobs is None:
                continue  # None: it ended after this step was decided, and its results were dropped
            last = min(first + count, request.num_prompt_tokens - 1)
            if first < last:
                results.add(request_id, FOUND, Found(first, [_NO_LOGPROBS] * (last - first)))
