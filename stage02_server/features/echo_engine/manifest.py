"""`--engine echo`."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class EchoFlags:
    """Which engine answers."""

    engine: str = option(
        "core", "core = the real engine; echo = answers with the prompt itself, without torch", ("core", "echo")
    )


FEATURE = Feature(
    name="echo_engine",
    help="an engine without a model that answers with the prompt",
    room=__package__,
    settings={"FrontendArgs": EchoFlags},
    parts=(Part("client", ".echo_engine:EchoCoreClient", key="engine=echo"),),
    conflicts={("engine", "in_process"): "the echo engine runs in the API process anyway"},
    events=("client.created",),
)
