"""The flag of the usage in streams."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class StreamUsageFlags:
    """Whether every stream ends with the usage."""

    enable_force_include_usage: bool = option(
        False, "tell the usage in every chunk of every stream and at its end, asked for or not"
    )


FEATURE = Feature(
    name="stream_usage",
    help="stream_options: how many tokens a stream took, at its end or all along",
    room=__package__,
    settings={"FrontendArgs": StreamUsageFlags},
    parts=(
        Part("request", ".fields:StreamUsageFields", key="SamplingRequest"),
        Part("answers", ".install:install", flags=("enable_force_include_usage",)),
    ),
)
