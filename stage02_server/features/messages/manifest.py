"""Anthropic's Messages API."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="messages",
    help="Anthropic's Messages API",
    room=__package__,
    parts=(
        Part(
            "routes",
            ".routes:install",
            tasks=("generate",),
            paths={"/v1/messages": "msg_", "/v1/messages/count_tokens": ""},
            late=True,
        ),
        Part("error", ".errors:error_json", key="/v1/messages"),
    ),
    needs=("tools", "structured_output"),
    events=("answer.parsed", "sse.chunk"),
)
