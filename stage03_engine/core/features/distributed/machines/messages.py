"""What the head and the machines of one engine tell each other, beside what all machines do (stage03_engine/nodes/messages.py)."""

from __future__ import annotations

import msgspec

from stage03_engine.nodes.messages import Bye, Join, Ping, Refusal, Welcome


class JoinEngine(Join, tag=True, kw_only=True):
    """Node -> head, first: a machine offers its processor. Its one number is its --node-rank."""

    nnodes: int
    model_path: str | None  # its own copy of the model
    tokenizer_path: str | None
    num_threads: int | None  # compute threads, for all of its workers


class StartWorkers(msgspec.Struct, tag=True):
    """Head -> node: start these, rank -> lane. They connect to `address` themselves, and get their configuration there."""

    workers: dict[int, str]
    address: str


class WorkerEnded(msgspec.Struct, tag=True):
    """Node -> head: a worker process of this machine ended."""

    lane: str
    exit_code: int


decode_report = msgspec.msgpack.Decoder(JoinEngine | WorkerEnded | Bye).decode
decode_order = msgspec.msgpack.Decoder(Welcome | Refusal | Ping | StartWorkers | Bye).decode
