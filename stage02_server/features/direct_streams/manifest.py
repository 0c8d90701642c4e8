"""The short way of a streamed token, and its switch."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class DirectStreamsFlags:
    """Which way a streamed token takes."""

    direct_streams: bool = option(
        True,
        "write the tokens of a stream where they appear; --no-direct-streams: each passes all layers around its handler",
    )


FEATURE = Feature(
    name="direct_streams",
    help="tokens in the middle of a stream go from the engine's outputs straight to the connection",
    room=__package__,
    settings={"FrontendArgs": DirectStreamsFlags},
    parts=(Part("server", ".direct:direct", key="direct_stream", flags=("direct_streams",)),),
)
