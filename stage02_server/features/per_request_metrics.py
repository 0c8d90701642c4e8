"""`--enable-per-request-metrics`: how long the answer took, in the answer itself (vllm/entrypoints/openai/protocol.py)."""

from __future__ import annotations

from pydantic import BaseModel

from stage03_engine.frontend.metrics import RequestStats


class PerRequestMetrics(BaseModel):
    """Times in milliseconds, over all answers of the request; None where there is nothing to measure."""

    time_to_first_token_ms: float  # from the request's arrival
    generation_time_ms: float  # from the first token of all to the last
    queue_time_ms: float  # until the scheduler took the request in
    mean_itl_ms: float | None  # from one token of an answer to its next
    tokens_per_second: float | None  # behind the first ones
    speculative_decoding: None = None


def metrics_of(answers: list[RequestStats]) -> PerRequestMetrics | None:
    """From the histories of the answers, all of which have a token; None without any, as with beam search."""
    if not answers:
        return None
    first = min(answers, key=lambda answer: answer.first_token)
    generation = max(answer.last_token for answer in answers) - first.first_token
    later_tokens = sum(answer.num_output_tokens - 1 for answer in answers)
    gaps = sum(answer.last_token - answer.first_token for answer in answers)
    return PerRequestMetrics(
        time_to_first_token_ms=1000 * (first.first_token - first.arrival),
        generation_time_ms=1000 * generation,
        queue_time_ms=1000 * first.queue_seconds,
        mean_itl_ms=1000 * gaps / later_tokens if later_tokens else None,
        tokens_per_second=later_tokens / generation if generation else None,
    )
