"""What the head and the other machines tell each other: msgpack over one connection per machine, never pickle.

A message is two frames or more. If the first is `CONTROL`, the second is one of the types below. Else the first names a launch of an
engine, and the rest is what the engine's own sockets carry (messages.py of stage 3), passed on unread.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from stage03_engine.messages import EngineReady

CONTROL = b""
_LAUNCH = struct.Struct("<HI")


class Join(msgspec.Struct, tag=True):
    """Node -> head, first: these engines can be started here. `facts` must be the same everywhere."""

    name: str  # of the machine, and the process id
    engines: list[int]
    facts: dict[str, str]
    monotonic_ns: int  # the node's clock
    cause: str | None = None


class Welcome(msgspec.Struct, tag=True):
    """Head -> node: it belongs to the service."""

    run_id: str  # of the trace
    cause: str | None = None


class Refusal(msgspec.Struct, tag=True):
    """Head -> node: it cannot join, and why."""

    message: str


class Ping(msgspec.Struct, tag=True):
    """Head -> node: no content. Sending it fails if the node is gone."""


class StartEngine(msgspec.Struct, tag=True):
    """Head -> node: start this engine; one that still has this number is ended first."""

    engine: int
    launch: int  # counts the starts of all engines, so that messages of an earlier start can be told apart


class EngineUp(msgspec.Struct, tag=True):
    """Node -> head: the engine has loaded its model."""

    engine: int
    launch: int
    ready: EngineReady


class EngineRefused(msgspec.Struct, tag=True):
    """Node -> head: the engine cannot start."""

    engine: int
    launch: int
    message: str


class EngineGone(msgspec.Struct, tag=True):
    """Node -> head: the process of the engine has ended."""

    engine: int
    launch: int
    exit_code: int


class Bye(msgspec.Struct, tag=True):
    """Either way: the sender ends, because it was told to."""


Report = Join | EngineUp | EngineRefused | EngineGone | Bye
Order = Welcome | Refusal | Ping | StartEngine | Bye
encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_order = msgspec.msgpack.Decoder(Order).decode


def engines_named(engines: Sequence[int]) -> str:
    """`engine 1`, or `engines 2, 3`."""
    return f"engine{'s' * (len(engines) > 1)} {', '.join(map(str, engines))}"


def launch_frame(engine: int, launch: int) -> bytes:
    """The first frame of what a launch of an engine sends or gets."""
    return _LAUNCH.pack(engine, launch)


def read_launch(frame: bytes) -> tuple[int, int]:
    """(engine, launch) of a first frame. Raises ValueError."""
    if len(frame) != _LAUNCH.size:
        raise ValueError(f"a frame of {len(frame)} bytes says nothing about an engine")
    engine, launch = _LAUNCH.unpack(frame)
    return engine, launch
