"""`--enable-per-request-metrics`: how long the answer took, in the answer itself (vllm/entrypoints/openai/completion/protocol.py)."""

from __future__ import annotations

from typing import Any

from stage02_server.features.per_request_metrics.fields import PerRequestMetrics
from stage02_server.protocol_types import AnswerHook
from stage03_engine.frontend.metrics import RequestStats
from stage03_engine.outputs import RequestOutput


class MetricsHook(AnswerHook):
    """Measures one HTTP request."""

    def __init__(self) -> None:
        self._ended: list[RequestStats] = []  # the histories of the answers that have ended

    def output(self, prompt: int, output: RequestOutput) -> None:
        """Keeps the histories."""
        self._ended += [answer.stats for answer in output.outputs if answer.stats is not None]

    def response(self, response: Any) -> None:
        """None if no answer has a token, as with beam search."""
        response.metrics = metrics_of([stats for stats in self._ended if stats.num_output_tokens])


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
