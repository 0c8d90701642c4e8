"""Request fields of sampling that few requests need, and the engine's features that handle them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, FiniteFloat

from stage02_server.protocol_types import Int32, Int64, RequestFields, Text

Scalar = bool | Int64 | FiniteFloat | Text


class RepetitionDetection(BaseModel):
    """When an output that repeats itself ends."""

    max_pattern_size: Int32 = Field(default=0, description="Tokens of the longest circle to look for.")
    min_pattern_size: Int32 = Field(default=0, description="Tokens of the shortest circle to look for.")
    min_count: Int32 = Field(
        default=0, description="How many times the same tokens must have come one after the other."
    )


class SamplingFields(RequestFields):
    """None leaves the default."""

    best_of: Int32 | None = Field(
        default=None, description="So many answers are made, and the n likeliest of them returned."
    )
    repetition_detection: RepetitionDetection | None = Field(
        default=None, description="End an answer that goes round in circles."
    )
    logprob_token_ids: list[Int64] | None = Field(
        default=None, description="With logprobs: tell those of these tokens instead of the likeliest ones'."
    )
    vllm_xargs: dict[Text, Scalar | list[Scalar]] | None = Field(
        default=None, description="Values for logits processors of your own."
    )

    def apply(self, params: dict[str, Any]) -> None:
        """Raises InvalidRequestError for sizes and counts that mean nothing."""
        if self.repetition_detection is not None:
            from stage03_engine.params.repetition_detection import RepetitionDetectionParams

            params["repetition_detection"] = RepetitionDetectionParams(**dict(self.repetition_detection))
        for name in ("best_of", "logprob_token_ids"):
            if (value := getattr(self, name)) is not None:
                params[name] = value
        if self.vllm_xargs:
            params["extra_args"] = self.vllm_xargs
