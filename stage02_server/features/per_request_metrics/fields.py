"""The field `metrics` of answers (vllm/entrypoints/openai/completion/protocol.py)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class PerRequestMetrics(BaseModel):
    """Times in milliseconds, over all answers of the request; None where there is nothing to measure."""

    time_to_first_token_ms: float = Field(description="Milliseconds to the first token.")  # from the request's arrival
    generation_time_ms: float = Field(description="Milliseconds from the first token to the last.")
    queue_time_ms: float = Field(description="Milliseconds in the queue.")
    mean_itl_ms: float | None = Field(description="Milliseconds from one token to the next, on average.")
    tokens_per_second: float | None = Field(description="Tokens per second after the first.")
    speculative_decoding: None = Field(default=None, description="Not told here.")


class MetricsField(BaseModel):
    """In a stream it comes with the usage."""

    metrics: PerRequestMetrics | None = Field(
        default=None, description="How long the request waited and took; with --enable-per-request-metrics."
    )
