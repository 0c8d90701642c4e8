"""The flags of the torch profiler (vllm/config/profiler.py, ProfilerConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class ProfilerSettings:
    """Part of ObservabilityConfig. What is left open is as in vLLM."""

    profiler_dir: str | None = option(
        None, "folder for torch profiles of the engine; POST /start_profile and /stop_profile make one"
    )
    profiler_config: dict[str, Any] | None = option(
        None, 'the same and what follows in vLLM\'s form: {"profiler": "torch", "torch_profiler_dir": "FOLDER", ...}'
    )
    torch_profiler_with_stack: bool | None = option(
        None, "profiles show which Python functions called; on if not given"
    )
    torch_profiler_record_shapes: bool | None = option(None, "profiles show the shapes of tensors")
    torch_profiler_with_memory: bool | None = option(None, "profiles show what memory is taken and given back")
    torch_profiler_with_flops: bool | None = option(None, "profiles show how much is computed")
    torch_profiler_use_gzip: bool | None = option(None, "profiles are compressed; on if not given")


class ProfilerFlags:
    """Part of VllmConfig."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """What --profiler-config says. Raises ConfigError for what it cannot say here."""
        if values["profiler_config"] is None:
            return {}
        from stage03_engine.core.features.profiler.profiler_config import settings_of

        return {name: (value, "profiler_config") for name, value in settings_of(values["profiler_config"]).items()}

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With --profiler-dir, the engine can record itself."""
        if config.observability_config.profiler_dir is None:
            return {}
        return {"scheduler": ["stage03_engine.core.features.profiler.profiler:ProfilerHook"]}


FEATURE = Feature(
    name="profiler",
    help="torch's profiler, for some steps of a running server",
    room=__package__,
    settings={"ObservabilityConfig": ProfilerSettings, "VllmConfig": ProfilerFlags},
    parts=(
        Part("call", ".profiler:start_profile", key="start_profile"),
        Part("call", ".profiler:stop_profile", key="stop_profile"),
    ),
    events=("profiler.started", "profiler.stopped"),
)
