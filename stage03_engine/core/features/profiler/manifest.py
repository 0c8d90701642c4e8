"""The flag of the torch profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class ProfilerDir:
    """Part of ObservabilityConfig."""

    profiler_dir: str | None = option(
        None, "folder for torch profiles of the engine; POST /start_profile and /stop_profile make one"
    )


class ProfilerFlags:
    """Part of VllmConfig."""

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
    settings={"ObservabilityConfig": ProfilerDir, "VllmConfig": ProfilerFlags},
    parts=(
        Part("call", ".profiler:start_profile", key="start_profile"),
        Part("call", ".profiler:stop_profile", key="stop_profile"),
    ),
    events=("profiler.started", "profiler.stopped"),
)
