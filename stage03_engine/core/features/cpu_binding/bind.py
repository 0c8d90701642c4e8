"""Bind the engine process to its cores, before it has compute threads: they inherit that."""

from __future__ import annotations

import os

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.cpu_binding.manifest import cores_of


def bind_process(config: VllmConfig) -> None:
    """Called once the configuration is known."""
    os.sched_setaffinity(0, cores_of(config.device_config.cpu_omp_threads_bind))
