"""Log-probabilities of the tokens of a prompt."""

from __future__ import annotations

from typing import Any, ClassVar


class PromptLogprobs:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "prompt_logprobs": {
            "scheduler": "stage03_engine.core.features.prompt_logprobs.scheduler_hook:PromptLogprobsSchedulerHook",
            "runner": "stage03_engine.core.features.prompt_logprobs.runner_hook:PromptLogprobsRunnerHook",
        }
    }
    WITH_DRAFTS: ClassVar[tuple[str, ...]] = ("prompt_logprobs",)
    prompt_logprobs: int | None = None  # as `logprobs`, for the tokens of the prompt

    def check(self: Any) -> None:
        """Raises InvalidRequestError."""
        from stage03_engine.sampling_params import MAX_LOGPROBS  # that module loads this one

        self._check(0 <= self.prompt_logprobs <= MAX_LOGPROBS, "prompt_logprobs", f"in [0, {MAX_LOGPROBS}]")
