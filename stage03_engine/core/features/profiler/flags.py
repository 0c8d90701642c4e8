"""The flag of the torch profiler."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option


@dataclass(frozen=True)
class ProfilerDir:
    """Part of ObservabilityConfig."""

    profiler_dir: str | None = option(
        None, "folder for torch profiles of the engine; POST /start_profile and /stop_profile make one"
    )
