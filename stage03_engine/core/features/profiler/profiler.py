"""torch.profiler around the steps of the engine (vllm/v1/worker/gpu_worker.py, profile)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import ConfigError
from stagetrace import trace

logger = logging.getLogger(__name__)


class TorchProfiler:
    """Writes one file per recording, for Perfetto or chrome://tracing. Raises ConfigError when the folder is unusable."""

    def __init__(
        self, directory: str | None, options: Mapping[str, Any] = MappingProxyType({}), gzip: bool = True
    ) -> None:
        """`options`: of torch.profiler.profile."""
        self._options, self._suffix = options, ".gz" * gzip
        self._directory = None if directory is None else Path(directory)
        self._running: profile | None = None
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write profiles to {directory!r}: {error.strerror}; see --profiler-dir"
            ) from error

    def start(self, step: int) -> bool:
        """Begin a recording; False when one runs, or there is no folder to write it to."""
        if self._directory is None or self._running is not None:
            return False
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._running = profile(activities=activities, **self._options)
        self._running.start()
        if trace.on:
            trace.emit("profiler.started", step=step)
        return True

    def stop(self, step: int) -> bool:
        """End the recording and write it; False when none runs, or it cannot be written. Blocks until it is written."""
        running, self._running = self._running, None
        if running is None or self._directory is None:
            return False
        running.stop()
        path = self._directory / f"engine-{os.getpid()}-{time.time_ns()}.pt.trace.json{self._suffix}"
        try:
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("the profile could not be written to %s: %s", path, error)
            return False
        if trace.on:
            trace.emit("profiler.stopped", step=step, file=str(path))
        return True


class ProfilerHook(SchedulerHook):
    """Installed with `--profiler-dir`. Raises ConfigError if the folder is unusable."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        asked = config.observability_config
        options = {
            "with_stack": asked.torch_profiler_with_stack is not False,
            "record_shapes": bool(asked.torch_profiler_record_shapes),
            "profile_memory": bool(asked.torch_profiler_with_memory),
            "with_flops": bool(asked.torch_profiler_with_flops),
        }
        self.profiler = TorchProfiler(asked.profiler_dir, options, gzip=asked.torch_profiler_use_gzip is not False)


def _hook(core: EngineCore) -> ProfilerHook | None:
    return next((hook for hook in core.scheduler.hooks if isinstance(hook, ProfilerHook)), None)


def start_profile(core: EngineCore) -> bool:
    """Start to record what torch does; False if it is being recorded already, or there is no folder for it."""
    hook = _hook(core)
    return hook is not None and hook.profiler.start(core.scheduler.step)


def stop_profile(core: EngineCore) -> bool:
    """Write the profile; False if there is none to write."""
    hook = _hook(core)
    return hook is not None and hook.profiler.stop(core.scheduler.step)
