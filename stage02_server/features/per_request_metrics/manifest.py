"""The flag of per-request metrics."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class MetricsFlags:
    """Whether answers report how long they waited and took."""

    enable_per_request_metrics: bool = option(
        False, "report in `metrics` how long each answer waited and took; in a stream, with the usage"
    )


ANSWERS = (
    "CompletionResponse",
    "ChatCompletionResponse",
    "ChatStreamResponse",
    "ResponseProgress",
    "ResponsesResponse",
    "AnthropicMessagesResponse",
)

FEATURE = Feature(
    name="per_request_metrics",
    help="how long an answer waited and took, in the answer itself",
    room=__package__,
    settings={"FrontendArgs": MetricsFlags},
    parts=(
        *(Part("response", ".fields:MetricsField", key=answer) for answer in ANSWERS),
        Part("answers", ".install:install", flags=("enable_per_request_metrics",)),
    ),
)
