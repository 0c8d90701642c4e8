"""What the head of a service and its other machines say to each other: msgpack over one connection per machine, never pickle.

A message is two frames or more. If the first is `CONTROL`, the second is one of the types below, or one that a room adds. Else the message
is the room's own.
"""

from __future__ import annotations

import msgspec

CONTROL = b""


class Join(msgspec.Struct, tag=True):
    """Node -> head, first: what can run here. `facts` must be the same everywhere (sameness.py)."""

    name: str  # of the machine, and the process id
    numbers: list[int]  # of the engines that it offers; of one engine's machines its own
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


class Bye(msgspec.Struct, tag=True):
    """Either way: the sender ends, because it was told to, or for the reason that it gives."""

    why: str = ""


encode = msgspec.msgpack.Encoder().encode
