"""`--scheduler-cls`, `--block-pool-cls`, `--worker-cls`, `--engine-cls`; and what other flags need that name a class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class OwnWorker:
    """Part of DeviceConfig."""

    engine_cls: str | None = option(
        None,
        "module:Class, an engine of your own in place of all that computes and decides; HTTP and the processes stay",
    )
    worker_cls: str = option(
        "auto", "module:Class to use instead of stage03_engine.core.worker:Worker, in whatever process a worker runs"
    )


class OwnClasses:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a class whose module is not there; the process that needs it looks into the module."""
        scheduler, pool = config.scheduler_config.scheduler_cls, config.cache_config.block_pool_cls
        worker, engine = config.device_config.worker_cls, config.device_config.engine_cls
        named = {"--scheduler-cls": scheduler, "--block-pool-cls": pool, "--worker-cls": worker, "--engine-cls": engine}
        for flag, path in named.items():
            if path not in (None, "auto"):
                from stage03_engine.core.features.own_classes.class_path import check_module

                check_module(path, flag)
        if worker != "auto" and "transcription" in config.supported_tasks:
            raise ConfigError("a Whisper model has no worker: leave out worker_cls")
        if engine is not None:
            OwnClasses._check_alone(config, scheduler or pool)

    @staticmethod
    def _check_alone(config: VllmConfig, other: str | None) -> None:
        """An engine of one's own does everything by itself, so nothing else can be asked of it. Raises ConfigError."""
        if "generate" not in config.supported_tasks:
            raise ConfigError("--engine-cls: an engine of your own writes text, and this model does something else")
        from stage03_engine.config import ModelConfig, VllmConfig as Config

        model = config.model_config
        none: dict[str, Any] = {"engine_cls": None, "worker_cls": "auto"}
        device = replace(config.device_config, **none)
        same = ModelConfig(model=model.model, dtype=model.dtype, max_model_len=model.max_model_len, shape=model.shape)
        kept: dict[str, Any] = {
            "observability_config": config.observability_config,
            "scheduler_config": config.scheduler_config,
        }
        plain = Config(model_config=same, device_config=device, **kept)  # what nobody has asked for
        seams = ("executor", "worker", "scheduler", "runner")
        asked = [name for seam in seams for name in config.hooks(seam) if name not in plain.hooks(seam)]
        if other or asked:
            raise ConfigError(f"--engine-cls: an engine of your own cannot be combined with {other or asked[0]}")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The worker, in the place of the walk's own."""
        worker, engine = config.device_config.worker_cls != "auto", config.device_config.engine_cls is not None
        return {
            "worker": ["stage03_engine.core.features.own_classes.own_workers:make_worker"] * worker,
            "core": ["stage03_engine.core.features.own_classes.own_engine:OwnEngineCore"] * engine,
        }


FEATURE = Feature(
    name="own_classes",
    help="a scheduler, a block pool, an executor, a worker or a whole engine of your own",
    room=__package__,
    settings={"DeviceConfig": OwnWorker, "VllmConfig": OwnClasses},
    parts=(
        Part("engine", ".own_classes:make_scheduler", key="own_scheduler"),
        Part("engine", ".class_path:check_module", key="check_module"),
        Part("engine", ".construct:construct", key="construct"),
    ),
    events=("own_class.chosen", "engine.step"),
)
