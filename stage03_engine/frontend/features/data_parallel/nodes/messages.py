"""What the head and machines with engines tell each other, beside what all machines do (stage03_engine/nodes/messages.py).

The first frame of what is no control message names a launch of an engine; the rest is what the engine's own sockets carry (messages.py of
stage 3), passed on unread.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from stage03_engine.messages import EngineReady
from stage03_engine.nodes.messages import Bye, Join, Ping, Refusal, Welcome

EQUAL = (
    "dtype", "hf_overrides", "kv_cache_dtype", "enable_lora", "lora_modules", "lora_digests", "max_lora_rank", "lora_dtype", "seed", "max_model_len", "logits_processors", "quantization", "block_size", "batch_invariant", "speculative_config",
    "runner_type", "convert_type", "pooler_config", "disable_any_whitespace", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
)  # fmt: skip
"""The settings that must be the same on all machines, those of features that are installed."""
_LAUNCH = struct.Struct("<HI")


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


decode_report = msgspec.msgpack.Decoder(Join | EngineUp | EngineRefused | EngineGone | Bye).decode
decode_order = msgspec.msgpack.Decoder(Welcome | Refusal | Ping | StartEngine | Bye).decode


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
