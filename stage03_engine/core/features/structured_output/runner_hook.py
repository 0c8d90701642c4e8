"""The masks of grammars on the logits (vLLM: apply_grammar_bitmask in v1/structured_output/utils.py)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stage03_engine.core.features.structured_output.scheduler_hook import MASKS
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.sched_output import SchedulerOutput
from stage04_kernels.features.bitmask import apply_token_bitmask
from stage04_kernels.sampler import to_device
from stagetrace import trace


class GrammarRunnerHook(RunnerHook):
    """Installed by the first request with `structured_outputs`."""

    def logits(self, logits: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> Tensor:
        """Forbid what a request's grammar forbids; rows of logits of requests without one stay as they are."""
        found, device = MASKS.of(scheduler_output.extras), self.runner.device
        if found is None:
            return logits
        masks = found.bits
        ids = [self.runner.batch.request_ids[row] for row in inputs.sampled]
        constrained = np.array([i for i, request_id in enumerate(ids) if request_id in masks])
        words = np.frombuffer(b"".join(masks[ids[i]] for i in constrained), dtype=np.int32).copy()
        bitmask, rows = to_device([words.reshape(len(constrained), -1), constrained], device)
        if trace.on:
            trace.emit("sampler.transform", step=scheduler_output.step, transform="grammar_mask", rows=len(constrained))
        return apply_token_bitmask(logits, bitmask, rows)
