"""What engines tell each other about blocks: msgpack, in one frame, over a sealed link.

Consumer -> producer: Want, Done. Producer -> consumer: for each Want the blocks that it still has, in order up to the first that is gone, then End.
`place` is the number under which the producer keeps the blocks of a request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from stage03_engine.core.request import Request

WINDOW = 16
"""Blocks of one Want. A request never has more under way, so neither side's memory fills with what the other cannot take yet."""


class Want(msgspec.Struct, tag="want", array_like=True):
    """Send me these blocks. `identity` stands for all that keys and values depend on beside tokens (`compatibility_hash`)."""

    identity: str
    place: int
    hashes: list[bytes]
    req: str
    cause: str | None = None


class Done(msgspec.Struct, tag="done", array_like=True):
    """I have what I need of this place, or need it no more."""

    place: int
    cause: str | None = None


class Block(msgspec.Struct, tag="block", array_like=True):
    """A block, and the checksum of its hash and its bytes."""

    place: int
    block_hash: bytes
    checksum: bytes
    data: bytes


class End(msgspec.Struct, tag="end", array_like=True):
    """The answer to a Want ends. `problem`: why nothing of this producer will ever fit."""

    place: int
    problem: str = ""
    cause: str | None = None


encode = msgspec.msgpack.Encoder().encode
decode_of_consumer = msgspec.msgpack.Decoder(Want | Done).decode
decode_of_producer = msgspec.msgpack.Decoder(Block | End).decode


class Source(NamedTuple):
    """Where the blocks of a request are."""

    address: str  # host:port
    place: int


def params_of(request: Request) -> dict[str, Any]:
    """What the request's client said about blocks elsewhere (vLLM: `request.kv_transfer_params`)."""
    return request.sampling_params.kv_transfer_params or {}


def source_of(request: Request) -> Source | None:
    """Where another engine keeps blocks for it, if one does."""
    params = params_of(request)
    if not params.get("do_remote_prefill"):
        return None
    return Source(address_of(params["remote_host"], params["remote_port"]), params["remote_request_id"])


def address_of(host: str, port: int | str) -> str:
    """`127.0.0.1:14579`, `[::1]:14579`"""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
