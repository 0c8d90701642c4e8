"""`--scheduler-cls`, `--block-pool-cls`, `--worker-cls`; and what other flags need that name a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class OwnWorker:
    """Part of DeviceConfig."""

    worker_cls: str = option(
        "auto", "module:Class to use instead of stage03_engine.core.worker:Worker, in whatever process a worker runs"
    )


class OwnClasses:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a class whose module is not there; the process that needs it looks into the module."""
        scheduler, pool = config.scheduler_config.scheduler_cls, config.cache_config.block_pool_cls
        worker = config.device_config.worker_cls
        for flag, path in (("--scheduler-cls", scheduler), ("--block-pool-cls", pool), ("--worker-cls", worker)):
            if path not in (None, "auto"):
                from stage03_engine.core.features.own_classes.class_path import check_module

                check_module(path, flag)
        if worker != "auto" and "transcription" in config.supported_tasks:
            raise ConfigError("a Whisper model has no worker: leave out worker_cls")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The worker, in the place of the walk's own."""
        own = config.device_config.worker_cls != "auto"
        return {"worker": ["stage03_engine.core.features.own_classes.own_workers:make_worker"] * own}


FEATURE = Feature(
    name="own_classes",
    help="a scheduler, a block pool, an executor or a worker of your own",
    room=__package__,
    settings={"DeviceConfig": OwnWorker, "VllmConfig": OwnClasses},
    parts=(
        Part("engine", ".own_classes:make_scheduler", key="own_scheduler"),
        Part("engine", ".class_path:check_module", key="check_module"),
        Part("engine", ".construct:construct", key="construct"),
    ),
    events=("own_class.chosen",),
)
