"""The workers' side: the model is loaded, cut, packed and recorded again, all as at start, from another folder."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from stage03_engine.core.features.weight_updates.messages import NEW_WEIGHTS
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.sched_output import SchedulerOutput


class WeightsRunnerHook(RunnerHook):
    """Installed with `--enable-weight-updates`. What fails here ends the engine: a worker with old weights beside one with new ones would be worse."""

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Do what the scheduler's side orders."""
        new = NEW_WEIGHTS.of(scheduler_output.extras)
        if new is not None:
            runner = self.runner
            where: dict[str, Any] = {"model_path": new.folder, "load_format": "auto"}
            runner.config = replace(runner.config, model_config=replace(runner.config.model_config, **where))
            with torch.inference_mode(False):  # as at start
                runner.load_model()
                runner.initialize_kv_cache(new.num_blocks)
            gc.unfreeze()  # the engine froze its first model out of the garbage collector's sight
            gc.collect()
            gc.freeze()
        return scheduler_output
