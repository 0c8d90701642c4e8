"""Drafts in the model runner, wherever they come from: they are inputs of a step, each position after one is sampled, and what differs
from its sample is dropped (vllm/v1/worker/gpu_model_runner.py, _calc_spec_decode_metadata)."""

from __future__ import annotations

from functools import cache

import numpy as np

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.draft_scheduler import SCHEDULED_DRAFTS
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.plugins import loaded
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.features.rejection_sampler import num_accepted
from stage04_kernels.sampler import SamplerOutput, to_device


@cache
def free_of_history() -> frozenset[str]:
    """The sampling parameters whose effect on a position does not depend on the tokens before it, or takes drafts for such tokens: their
    features say so."""
    return frozenset(field for part in loaded("params") for field in getattr(part, "WITH_DRAFTS", ()))


def needs_history(params: SamplingParams) -> bool:
    """True if a parameter acts on a step and its feature does not declare it WITH_DRAFTS: a wrong guess would then be a wrong token."""
    acting = (field for field, seams in params.used() if not seams.keys().isdisjoint(("scheduler", "runner")))
    return any(field not in free_of_history() for field in acting)


class DraftVerifier(RunnerHook):
    """Verifies the drafts of a step. Its subclasses propose those of the next one."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.rows_per_request = 1 + config.speculative_config.num_speculative_tokens
        self.drafts: dict[str, list[int]] = {}  # of the current step

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Drafts are inputs of the step after the known tokens; they are not known tokens yet."""
        batch, scheduled = self.runner.batch, SCHEDULED_DRAFTS.of(scheduler_output.extras)
        self.drafts = self.drafted(scheduled.token_ids if scheduled else {}, scheduler_output)
        for request_id, draft in self.drafts.items():
            row = batch.row_of[request_id]
            start = batch.num_tokens[row]
            batch.token_ids[row, start : start + len(draft)] = draft

    def drafted(self, scheduled: dict[str, list[int]], scheduler_output: SchedulerOutput) -> dict[str, list[int]]:
        """The drafts of this step, from what the scheduler has made room for."""
        return scheduled

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """With k drafts a request has k + 1 rows of logits."""
        if not self.drafts:
            return
        batch, starts = self.runner.batch, inputs.metadata.query_start_loc_cpu
        sampled, rows = set(inputs.sampled), list[int]()
        indices, ahead = list[int](), list[int]()
        for place, request_id in enumerate(scheduler_output.num_scheduled_tokens):
            row, num_drafts = batch.row_of[request_id], len(self.drafts.get(request_id, ()))
            if row in sampled:
                indices += range(starts[place + 1] - num_drafts - 1, starts[place + 1])
                rows += [row] * (num_drafts + 1)
                ahead += range(num_drafts + 1)
        inputs.logits_indices = to_device([np.array(indices)], self.runner.device)[0]
        inputs.sampled, inputs.ahead = rows, ahead

    def after_sample(self, sampled: dict[str, list[int]], output: SamplerOutput, inputs: StepInputs) -> None:
        """Keep the accepted drafts, and one token more. The keys and values of the rejected ones count as not computed, and
        blocks that held nothing else are dropped (the scheduler frees them by the same rule)."""
        if not self.drafts:
            return
        batch, drafts = self.runner.batch, [self.drafts.get(request_id, []) for request_id in sampled]
        for request_id, draft, kept in zip(sampled, drafts, num_accepted(output.sampled_token_ids, drafts)):
            del sampled[request_id][kept + 1 :]
            row = batch.row_of[request_id]
            batch.num_computed[row] -= len(draft) - kept
            batch.num_blocks[row] = min(batch.num_blocks[row], cdiv(int(batch.num_computed[row]), batch.block_size))
