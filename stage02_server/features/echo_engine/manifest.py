"""`--engine echo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class EchoFlags:
    """Which engine answers."""

    engine: str = option(
        "core", "core = the real engine; echo = answers with the prompt itself, without torch", ("core", "echo")
    )

    def check(self: Any) -> None:
        """Raises ConfigError for what is about the real engine."""
        if self.engine == "echo" and getattr(self, "in_process", False):
            raise ConfigError("in_process is about the real engine; the echo engine runs in the API process anyway")


FEATURE = Feature(
    name="echo_engine",
    help="an engine without a model that answers with the prompt",
    room=__package__,
    settings={"FrontendArgs": EchoFlags},
    parts=(Part("client", ".echo_engine:EchoCoreClient", key="engine=echo"),),
    events=("client.created",),
)
