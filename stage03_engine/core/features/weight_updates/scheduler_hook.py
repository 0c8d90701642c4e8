"""The engine core's side: are these weights the model's, does nothing run, and which version is it?

Everything that can be wrong with the weights is found before any worker is told: then the old ones stay, untouched.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset, settle
from stage03_engine.core.features.weight_updates.messages import NEW_WEIGHTS, NewWeights
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.models.loader import checkpoint_tensors
from stage03_engine.core.models.registry import model_class
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import BusyError, InvalidRequestError, StagesError
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.engine_core import EngineCore


class WeightsSchedulerHook(SchedulerHook):
    """Installed with `--enable-weight-updates`."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.version = 0  # of the weights; 0: those of the start
        self.is_closed = False  # new weights are about to come

    def added(self, request: Request) -> None:
        """Raises BusyError while weights are being replaced."""
        if self.is_closed:
            raise BusyError("The engine's weights are being replaced; send the request again.", "model")
        if trace.on and self.version:
            trace.emit("weights.used", req=request.request_id, version=self.version)


def hook_of(core: EngineCore) -> WeightsSchedulerHook:
    """Raises InvalidRequestError if the engine was started without it."""
    hook = next((hook for hook in core.scheduler.hooks if isinstance(hook, WeightsSchedulerHook)), None)
    if hook is None:
        raise InvalidRequestError("This engine keeps its weights: start it with --enable-weight-updates.")
    return hook


def prepare_weights(core: EngineCore, folder: str) -> bool:
    """Check the weights in a folder; from now on no request is taken. Raises InvalidRequestError, and then all stays as it is."""
    hook = hook_of(core)
    settle(core)
    if core.has_unfinished_requests:
        count = len(core.scheduler.requests)
        raise InvalidRequestError(
            f"Weights cannot be replaced while requests run ({count} now): let them end, or abort them."
        )
    shape, backend = core.config.shape, core.config.device_config.attention_backend
    try:
        with torch.device("meta"):
            model = model_class(shape.architecture)(shape, backend)
        model.load_weights(checkpoint_tensors(Path(folder)))
    except StagesError as error:
        raise InvalidRequestError(f"The weights are not replaced: {error}") from error
    hook.is_closed = True
    return True


def update_weights(core: EngineCore, folder: str, version: int) -> bool:
    """Replace the weights by those that were checked, and forget all cached prefixes."""
    hook, started = hook_of(core), time.monotonic()
    if not hook.is_closed and hook.version == version:  # started again since the others were asked
        return True
    if not hook.is_closed:
        raise InvalidRequestError("These weights were not checked: prepare_weights comes first.")
    reset(core.scheduler)
    output = SchedulerOutput(core.scheduler.step, [], {}, {}, [], [], {})
    NEW_WEIGHTS.put(output.extras, NewWeights(folder, core.num_gpu_blocks))
    core.executor.execute_model(output)
    hook.version, hook.is_closed = version, False
    if trace.on:
        trace.emit("weights.updated", version=version, seconds=round(time.monotonic() - started, 4))
    return True


def keep_weights(core: EngineCore) -> bool:
    """Another engine has refused the new ones: go on with the old."""
    hook_of(core).is_closed = False
    return True
