"""What the machines of one engine say to each other, apart from their workers: msgpack over an encrypted socket.

Node -> head: NodeHello, WorkerEnded, NodeLeft
Head -> node: NodeInit or NodeRefused, Ping, NodeStop
"""

from __future__ import annotations

import msgspec


class NodeHello(msgspec.Struct, tag="hello"):
    """A machine offers its processor. `agreed` is what must be equal everywhere (sameness.py)."""

    node_rank: int
    nnodes: int
    agreed: dict[str, str]
    model_path: str | None  # its own copy of the model
    tokenizer_path: str | None
    num_threads: int | None  # compute threads, for all of its workers


class NodeInit(msgspec.Struct, tag="init"):
    """Start these workers: rank -> lane. They connect to `address` themselves, and get their configuration there."""

    workers: dict[int, str]
    address: str


class NodeRefused(msgspec.Struct, tag="refused"):
    """The machine cannot join."""

    why: str


class Ping(msgspec.Struct, tag="ping"):
    """No content. Sending it fails if the machine is gone."""


class NodeStop(msgspec.Struct, tag="stop"):
    """The engine ends. `why` is empty if it ends normally."""

    why: str = ""


class WorkerEnded(msgspec.Struct, tag="ended"):
    """A worker process of this machine ended."""

    lane: str
    exit_code: int


class NodeLeft(msgspec.Struct, tag="left"):
    """This machine was told to stop."""


encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(NodeHello | WorkerEnded | NodeLeft).decode
decode_from_head = msgspec.msgpack.Decoder(NodeInit | NodeRefused | Ping | NodeStop).decode
