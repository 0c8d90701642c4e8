"""The messages between the front end and the engine core: msgpack, never pickle.

Input  (front end ROUTER -> engine DEALER): [request type, payload]
Output (engine PUSH -> front end PULL):     [payload], or [ENGINE_CORE_DEAD, reason]

A feature's data travels as plain msgpack in `EngineCoreRequest.task` and `EngineCoreOutput.result`; the feature converts it
back (`payload`), so this file knows no feature. `cause` is the trace reference ("pid:seq") of the event that sent the message.
Source: vllm/v1/engine/__init__.py and vllm/v1/serial_utils.py.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.errors import BusyError
from stage03_engine.sampling_params import SamplingParams

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"


T = TypeVar("T")


def payload(value: Any, kind: type[T]) -> T:
    """Convert a `task` or a part of a `result` back to its type. Raises msgspec.ValidationError if it does not fit.

    When front end and core share a process nothing is encoded, and the object itself arrives.
    """
    return msgspec.convert(value, kind)


class EngineCoreRequestType(enum.Enum):
    """First frame of an input message."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"


class FinishReason(enum.IntEnum):
    """Why a request ended. STOP: end-of-text, stop token or stop string; LENGTH: max_tokens or the context is full."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False):
    """A request as the engine core receives it: token ids only, no text."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_id: int | None = None
    arrival_time: float = 0.0  # time.monotonic() at the front end, for statistics only
    priority: int = 0  # a smaller number goes first, under --scheduling-policy priority
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    cause: str | None = None
    task: Any = None  # what it asks for instead of text: PoolingParams, AudioInput (see `payload`)
    tenant: int | None = None  # the number of its API key, if there are several


class AbortRequests(msgspec.Struct, array_like=True, gc=False):
    """Forget these requests; unknown ids are ignored (they may just have finished)."""

    request_ids: list[str]
    cause: str | None = None


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """Call one of the engine core's methods that are not part of serving requests (EngineCore.call)."""

    call_id: int
    method: str
    cause: str | None = None
    args: list[Any] = []  # plain msgpack


class UtilityResult(msgspec.Struct, array_like=True, gc=False):
    """The answer to a UtilityRequest. `error`: why the method refused, in one line."""

    call_id: int
    result: Any
    error: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of one position: the sampled token first, then the k most likely in descending order.
    `sampled_rank` is the sampled token's place, 1 for the most likely."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """What one step added to one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    queued_seconds: float | None = None  # with the first token only: from its arrival until it was first scheduled
    error: str | None = None  # with FinishReason.ERROR
    num_cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    error_param: str | None = None  # the field of the request to blame for the error, if any
    ends_with_text: bool = False  # with FinishReason.STOP: the newest token is text, unlike a stop token
    result: dict[str, Any] | None = None  # what features add, by name: "pooled", "speech", "prompt_logprobs"
    num_preemptions: int = 0  # of the request so far
    busy: bool = False  # with `error`: only for now


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The state of the scheduler after a step. `kv_cache_usage` is in [0, 1]; `num_preemptions` and what follows count from
    the start. Prefix-cache queries and hits are in tokens, counted when a request is first admitted."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0  # of those that wait: not for room, but until a feature has prepared them
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    counts: dict[str, int] = {}  # what features count, by the name of its metric

    def count(self, **more: int) -> None:
        """Add to what features count. In a new dictionary: the last one may be being encoded."""
        self.counts = self.counts | {name: self.counts.get(name, 0) + number for name, number in more.items()}


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """Everything that one engine step sends to the front end."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    utility_result: UtilityResult | None = None
    engine_index: int = 0
    cause: str | None = None
    step: int | None = None  # the engine step that made them, for the trace
    trace_events: list[bytes] = []  # while the scheduler is being watched: its trace events, as JSON


def refusal(request_id: str, error: ValueError) -> EngineCoreOutputs:
    """The answer to a request that the engine core refuses; `error.param` is the field to blame, if any."""
    refused = EngineCoreOutput(request_id, [], None, FinishReason.ERROR, error=str(error))
    refused.busy = isinstance(error, BusyError)
    refused.error_param = getattr(error, "param", None)
    return EngineCoreOutputs([refused])


class EngineHello(msgspec.Struct, tag="hello"):
    """Handshake 1, engine -> front end: the engine is up; `monotonic_ns` is its clock (time.monotonic_ns)."""

    pid: int
    monotonic_ns: int
    cause: str | None = None


class EngineInit(msgspec.Struct, tag="init"):
    """Handshake 2, front end -> engine: the configuration and the sockets to use."""

    config: VllmConfig
    input_address: str
    output_address: str
    run_id: str = ""  # of the trace
    cause: str | None = None


class EngineReady(msgspec.Struct, tag="ready"):
    """Handshake 3, engine -> front end: weights loaded, KV cache allocated."""

    num_gpu_blocks: int
    max_model_len: int
    cause: str | None = None


class EngineFailed(msgspec.Struct, tag="failed"):
    """Handshake 3 instead: why the engine cannot start, in one line."""

    message: str


MALFORMED = (ValueError, RecursionError, msgspec.MsgspecError)  # what decoding raises for bytes that are no message
encode = msgspec.msgpack.Encoder().encode
decode_add = msgspec.msgpack.Decoder(EngineCoreRequest).decode
decode_abort = msgspec.msgpack.Decoder(AbortRequests).decode
decode_utility = msgspec.msgpack.Decoder(UtilityRequest).decode
decode_outputs = msgspec.msgpack.Decoder(EngineCoreOutputs).decode
decode_handshake = msgspec.msgpack.Decoder(EngineHello | EngineInit | EngineReady | EngineFailed).decode
