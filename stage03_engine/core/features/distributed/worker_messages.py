"""What crosses between an executor and its workers: msgpack, never pickle.

Executor -> worker: (STEP, SchedulerOutput, cause), the same bytes for every worker, or (CALL, WorkerInit or WorkerCall)
Worker -> executor: (STEP, ModelRunnerOutput, cause) from the output rank alone, (CALL, WorkerHello or WorkerResult), or
(FAILED, WorkerFailed)

`cause` is the trace reference of the event that sent a step, and empty without a trace or in other messages.
Source: vllm/v1/executor/multiproc_executor.py (its message queues carry pickles).
"""

from __future__ import annotations

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import ConfigError, EngineDeadError, ModelNotFoundError, StagesError

STEP, CALL, FAILED = b"\x00", b"\x01", b"\x02"
SHUTDOWN = "shutdown"


class WorkerHello(msgspec.Struct, tag="hello"):
    """Handshake 1, worker -> executor: the process is up; `monotonic_ns` is its clock (time.monotonic_ns)."""

    pid: int
    monotonic_ns: int
    cause: str | None = None


class WorkerInit(msgspec.Struct, tag="init"):
    """Handshake 2, executor -> worker: the configuration, its place, and where the workers meet (`init_method` of torch)."""

    config: VllmConfig
    rank: int
    local_rank: int  # which GPU of its machine
    num_threads: int | None  # compute threads on a CPU
    init_method: str
    run_id: str = ""  # of the trace
    cause: str | None = None


class WorkerCall(msgspec.Struct, tag="call"):
    """Call one of the worker's methods that are not a step."""

    method: str
    argument: int | None = None


class WorkerResult(msgspec.Struct, tag="result"):
    """The answer to a WorkerInit (handshake 3: the weights are loaded; the bytes of a KV-cache block) or to a WorkerCall."""

    value: int = 0


class WorkerFailed(msgspec.Struct, tag="failed"):
    """Instead of an answer: the names of an error's class and its base classes, and its text."""

    kinds: list[str]
    message: str


class WorkerDiedError(StagesError, EngineDeadError):
    """A worker process ended without being asked to. The log gets one line, and callers see a dead engine."""


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ConfigError, ModelNotFoundError, StagesError, MemoryError, AssertionError, ValueError, TypeError, NotImplementedError,
        RuntimeError,
    )
}  # fmt: skip
"""Errors that keep their class on the way. Any other arrives as its nearest base class among these, or as RuntimeError."""


def failure_of(error: Exception) -> WorkerFailed:
    """An error as a message."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    text = " ".join(str(error).split())
    return WorkerFailed(kinds, text if kinds[0] in _KINDS and text else f"{kinds[0]}: {text}")


def error_of(failed: WorkerFailed, lane: str) -> Exception:
    """The error that a worker reported, with the worker's name in front."""
    kind = next((_KINDS[name] for name in failed.kinds if name in _KINDS), RuntimeError)
    return kind(f"{lane}: {failed.message}")


encode = msgspec.msgpack.Encoder().encode
decode_step = msgspec.msgpack.Decoder(SchedulerOutput).decode
decode_output = msgspec.msgpack.Decoder(ModelRunnerOutput).decode
decode_call = msgspec.msgpack.Decoder(WorkerInit | WorkerCall).decode
decode_answer = msgspec.msgpack.Decoder(WorkerHello | WorkerResult).decode
decode_failed = msgspec.msgpack.Decoder(WorkerFailed).decode
