"""The engine core's side of sleeping: who may sleep when, and what a request is told meanwhile (vllm/v1/engine/core.py, EngineCore.sleep).

The workers are told as they are told all else: by a decision, here one without requests. So every executor carries it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset, settle
from stage03_engine.core.features.sleep.messages import KV_CACHE, ORDER, TAGS, WEIGHTS, Order
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import BusyError, InvalidRequestError
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.engine_core import EngineCore

ASLEEP = "The engine sleeps; wake it up (POST /wake_up, or wake_up() in Python), then send the request again."


class SleepSchedulerHook(SchedulerHook):
    """Installed with `--enable-sleep-mode`. Invariant: while a part of the memory is away, no request is in the scheduler."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.level = 0  # 0: awake
        self.asleep: set[str] = set()  # of TAGS

    def added(self, request: Request) -> None:
        """Raises BusyError while it sleeps."""
        if self.asleep:
            raise BusyError(ASLEEP, "model")

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        assert not (self.asleep and self.scheduler.requests), "requests in an engine that sleeps"


def hook_of(core: EngineCore) -> SleepSchedulerHook:
    """Raises InvalidRequestError if the engine was started without it."""
    hook = next((hook for hook in core.scheduler.hooks if isinstance(hook, SleepSchedulerHook)), None)
    if hook is None:
        raise InvalidRequestError("This engine cannot sleep: start it with --enable-sleep-mode.")
    return hook


def sleep(core: EngineCore, level: int) -> bool:
    """Give memory back. A deeper level follows a lighter one; the same again changes nothing. Raises InvalidRequestError while there are requests."""
    hook = hook_of(core)
    if level not in (1, 2):
        raise InvalidRequestError(f"The level of sleep is 1 (the weights are kept) or 2, not {level}.", "level")
    if level == 2 and getattr(getattr(core.config, "lora_config", None), "enable_lora", False):
        raise InvalidRequestError(
            "With --enable-lora the level of sleep is 1: level 2 would lose the adapters.", "level"
        )
    if hook.asleep and (hook.level >= level or hook.asleep != set(TAGS)):
        return True
    settle(core)
    if core.has_unfinished_requests:
        count = len(core.scheduler.requests)
        raise InvalidRequestError(
            f"The engine cannot fall asleep while requests run ({count} now): let them end, or abort them."
        )
    reset(core.scheduler)
    _tell(core, Order(level, num_blocks=core.num_gpu_blocks))
    hook.level, hook.asleep = level, set(TAGS)
    return _changed(hook)


def wake_up(core: EngineCore, tags: list[str]) -> bool:
    """Take memory again: these parts, or without any all. A part that is awake stays so."""
    hook = hook_of(core)
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise InvalidRequestError(
            f"There is no {unknown[0][:100]!r} to wake up; tags is a list of {WEIGHTS} and {KV_CACHE}.", "tags"
        )
    if waking := sorted(hook.asleep & set(tags or TAGS)):
        _tell(core, Order(wake=waking, num_blocks=core.num_gpu_blocks))
        hook.asleep -= set(waking)
        hook.level = hook.level if hook.asleep else 0
        _changed(hook)
    return True


def is_awake(core: EngineCore) -> bool:
    """Can it run requests?"""
    return not hook_of(core).asleep


def sleep_level(core: EngineCore) -> int:
    """0: it is awake."""
    return hook_of(core).level


def _tell(core: EngineCore, order: Order) -> None:
    output = SchedulerOutput(core.scheduler.step, [], {}, {}, [], [])
    output.extras = {}
    ORDER.put(output.extras, order)
    core.executor.execute_model(output)


def _changed(hook: SleepSchedulerHook) -> bool:
    if trace.on:
        trace.emit("sleep.changed", level=hook.level, asleep=sorted(hook.asleep))
    return True
