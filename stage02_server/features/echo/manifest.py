"""echo: the prompt in the answer."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="echo",
    help="the prompt in front of the answer",
    room=__package__,
    parts=(
        Part("request", ".fields:EchoFields", key="CompletionRequest"),
        Part("request", ".fields:EchoedMessage", key="ChatCompletionRequest"),
    ),
    events=("request.echoed",),
)
