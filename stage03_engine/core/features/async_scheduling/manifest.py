"""`--async-scheduling`: the flag, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_ROOM = "stage03_engine.core.features.async_scheduling."
SCHEDULER = _ROOM + "async_scheduler:AsyncScheduler"


@dataclass(frozen=True)
class AsyncScheduling:
    """Part of SchedulerConfig."""

    async_scheduling: bool = option(
        False, "decide each step while the model still runs the one before it; the tokens are the same"
    )


class AsyncSchedulingFlags:
    """Part of VllmConfig."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """The scheduler that can look ahead, as vLLM chooses its own (SchedulerConfig.get_scheduler_cls)."""
        alone = values["async_scheduling"] and values.get("pipeline_parallel_size", 1) == 1  # they conflict
        return {"scheduler_cls": (SCHEDULER, "async_scheduling")} if alone else {}

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for settings that need the newest tokens before the next decision."""
        if not config.scheduler_config.async_scheduling:
            return
        if config.scheduler_config.scheduler_cls != SCHEDULER:
            raise ConfigError("async_scheduling brings its own scheduler: leave out scheduler_cls, or async_scheduling")
        if "generate" not in config.supported_tasks:
            raise ConfigError("async_scheduling is for models that generate text; leave it out for this one")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """Another core, whose steps overlap."""
        return {"core": [_ROOM + "async_core:AsyncEngineCore"] * config.scheduler_config.async_scheduling}


FEATURE = Feature(
    name="async_scheduling",
    help="decide a step while the model still runs the one before it",
    room=__package__,
    needs=("own_classes",),  # the scheduler is one by name
    settings={"SchedulerConfig": AsyncScheduling, "VllmConfig": AsyncSchedulingFlags},
    parts=(Part("replay", SCHEDULER, key=SCHEDULER),),
    conflicts={("async_scheduling", "speculative_config"): "drafts follow from tokens that are not known yet"},
)
