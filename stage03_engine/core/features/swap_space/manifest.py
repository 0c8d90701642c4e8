"""The flags of swapping: what happens to the KV cache of preempted requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class SwapSpaceSize:
    """Part of CacheConfig."""

    swap_space: float = option(
        1.0, "GiB of CPU memory for the blocks of preempted requests, with --preemption-mode swap", at_least=0
    )


@dataclass(frozen=True)
class PreemptionMode:
    """Part of SchedulerConfig."""

    preemption_mode: str = option(
        "recompute", "what becomes of a preempted request's keys and values: computed again, or swapped to CPU memory",
        ("recompute", "swap"),
    )  # fmt: skip


class SwapSpaceFlags:
    """Part of VllmConfig."""

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With --preemption-mode swap, the scheduler swaps blocks out and in, and the runner copies them."""
        if config.scheduler_config.preemption_mode != "swap":
            return {}
        return {
            "scheduler": ["stage03_engine.core.features.swap_space.swap_space:SwapHook"],
            "runner": ["stage03_engine.core.features.swap_space.swap_copies:SwapCopies"],
        }


FEATURE = Feature(
    name="swap_space",
    help="a preempted request's KV-cache blocks go to CPU memory, instead of being computed again",
    room=__package__,
    settings={"CacheConfig": SwapSpaceSize, "SchedulerConfig": PreemptionMode, "VllmConfig": SwapSpaceFlags},
    parts=(Part("replay", ".recorded_swaps:RecordedSwapHook", key="num_swap_blocks"),),
    events=("kv.swapped",),
)
