"""`--engine echo`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="echo_engine",
    help="an engine without a model that answers with the prompt",
    room=__package__,
    parts=(Part("client", ".echo_engine:EchoCoreClient", key="echo"),),
    events=("client.created",),
)
