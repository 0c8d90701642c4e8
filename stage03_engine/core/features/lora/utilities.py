"""What clients may call while the engine runs (vllm/v1/engine/core.py, EngineCore.add_lora and the like). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.core.features.lora.files import digest_in
from stage03_engine.core.features.lora.messages import CHANGES, REPORT, Changes
from stage03_engine.core.features.lora.scheduler_hook import Known, LoRASchedulerHook
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.params.lora import check_kinds

if TYPE_CHECKING:
    from stage03_engine.core.engine_core import EngineCore


def add_lora(core: EngineCore, name: str, int_id: int, path: str, digest: str | None = None) -> bool:
    """Let all workers read an adapter, which requests may name from now on. False if there is one with this number.

    `int_id` is new for each load, also of the same name: blocks of the KV cache are found again under it. `digest` is that of the files as the
    front end found them; without one it is of those that are there now. Raises InvalidRequestError with the reason, in one line, for one that
    cannot be read, is no longer the same, or does not fit.
    """
    hook = _hook(core)
    check_kinds(lora_name=(name, str), lora_int_id=(int_id, int), lora_path=(path, str))
    if int_id < 1:
        raise InvalidRequestError(f"lora_int_id must be at least 1, got {int_id}.")
    if int_id in hook.known:
        return False
    try:
        digest = digest or digest_in(path)
    except ConfigError as error:
        raise InvalidRequestError(f"adapter {name}: {error}") from error
    failed = _tell_workers(core, hook, add=[(int_id, name, path, digest)])
    if int_id in failed:
        raise InvalidRequestError(failed[int_id])
    hook.known[int_id] = Known(name, digest)
    return True


def remove_lora(core: EngineCore, int_id: int) -> bool:
    """Forget an adapter. Its unfinished requests go on, and its weights stay until the last of them has ended. False if it is unknown."""
    hook = _hook(core)
    check_kinds(lora_int_id=(int_id, int))
    if not hook.remove(int_id):
        return False
    _tell_workers(core, hook)
    return True


def list_loras(core: EngineCore) -> list[int]:
    """The numbers of the adapters that requests may name."""
    return sorted(_hook(core).known)


def pin_lora(core: EngineCore, int_id: int) -> bool:
    """Keep an adapter in its place and in memory. False if it is unknown. Raises InvalidRequestError if the others would have no place left."""
    hook = _hook(core)
    check_kinds(lora_int_id=(int_id, int))
    try:
        pinned = hook.pin(int_id)
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from error
    if pinned:
        _tell_workers(core, hook, pin=[int_id])
    return pinned


def _hook(core: EngineCore) -> LoRASchedulerHook:
    found = next((hook for hook in core.scheduler.hooks if isinstance(hook, LoRASchedulerHook)), None)
    if found is None:
        raise InvalidRequestError("this engine takes no adapters: start it with --enable-lora.")
    return found


def _tell_workers(
    core: EngineCore,
    hook: LoRASchedulerHook,
    add: list[tuple[int, str, str, str]] | None = None,
    pin: list[int] | None = None,
) -> dict[int, str]:
    """A step without requests: so every executor carries it to all of its workers, in order with the others. Returns what failed."""
    changes = hook.take_changes()
    if not (add or pin or changes.remove):
        return {}
    output = SchedulerOutput(core.scheduler.step, [], {}, {}, [], [])
    CHANGES.put(output.extras, Changes(add or [], changes.remove, pin or []))
    report = REPORT.of(core.executor.execute_model(output).extras)
    return {} if report is None else report.failed
