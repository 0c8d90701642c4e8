"""Adapters that come and go while the engine runs: what clients of the engine core may call (vllm/v1/worker/lora_model_runner_mixin.py)."""

from __future__ import annotations

from typing import Any

from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.lora.hooks import LoRARunnerHook, LoRASchedulerHook
from stage03_engine.errors import ConfigError, InvalidRequestError


def add_lora(core: EngineCore, name: str, number: int, folder: str) -> bool:
    """Read an adapter. Raises InvalidRequestError for one that does not fit, or cannot be read."""
    try:
        _runner(core).add(number, name, folder)
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from error
    _scheduler(core).numbers.add(number)
    return True


def remove_lora(core: EngineCore, number: int) -> bool:
    """From now on no request may begin with it; it is forgotten when the last one ends."""
    scheduler, runner = _scheduler(core), _runner(core)
    if number not in scheduler.numbers:
        return False
    scheduler.numbers.discard(number)
    scheduler.when_unused(number, lambda: runner.remove(number))
    return True


def list_loras(core: EngineCore) -> list[int]:
    """The numbers of the adapters that requests may begin with."""
    return sorted(_scheduler(core).numbers)


def pin_lora(core: EngineCore, number: int) -> bool:
    """All adapters are where they are used."""
    return number in _scheduler(core).numbers


def _scheduler(core: EngineCore) -> LoRASchedulerHook:
    return next(hook for hook in core.scheduler.hooks if isinstance(hook, LoRASchedulerHook))


def _runner(core: Any) -> LoRARunnerHook:
    return next(hook for hook in core.executor.worker.model_runner.hooks if isinstance(hook, LoRARunnerHook))
