"""Prompt lookup: guess that what followed the last tokens before will follow them again (vllm/v1/spec_decode/ngram_proposer.py).

A summary, an edited text or a chat repeats long stretches of its context. Finding them costs no model at all.
Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from functools import cache

import numpy as np

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.draft_scheduler import NEXT_DRAFTS, SCHEDULED_DRAFTS, NextDrafts
from stage03_engine.core.features.spec_decode.manifest import SpeculativeConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import InputBatch, StepInputs
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.plugins import loaded
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.features.rejection_sampler import num_accepted
from stage04_kernels.sampler import SamplerOutput, to_device
from stagetrace import trace


def find_continuation(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    """Where the last n tokens occurred before: the index after their latest earlier occurrence, for the largest n in
    [shortest, longest] that has one; None without any. The two occurrences may overlap. tokens: [num_tokens]."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # where an occurrence of the last token ends
    found = ends if shortest == 1 else ends[:0]
    for n in range(2, longest + 1):
        ends = ends[ends >= n - 1]
        ends = ends[tokens[ends - (n - 1)] == tokens[last - (n - 1)]]  # now n tokens are equal
        if not len(ends):
            break
        if n >= shortest:
            found = ends
    return int(found[-1]) + 1 if len(found) else None


@cache
def free_of_history() -> frozenset[str]:
    """The sampling parameters whose effect on a position does not depend on the tokens before it: their features say so."""
    return frozenset(field for part in loaded("params") for field in getattr(part, "WITHOUT_HISTORY", ()))


def needs_history(params: SamplingParams) -> bool:
    """True if a parameter acts on a step and its feature does not declare it WITHOUT_HISTORY: a wrong guess would then be a wrong token."""
    acting = (field for field, seams in params.used() if not seams.keys().isdisjoint(("scheduler", "runner")))
    return any(field not in free_of_history() for field in acting)


class NgramProposer:
    """Proposes `num_speculative_tokens` tokens, or none."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.num_tokens = config.num_speculative_tokens
        self.shortest, self.longest = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, tokens: np.ndarray) -> list[int]:
        """What followed the earlier occurrence. Where that runs into the end of `tokens` it goes on with its own guesses:
        the text repeats with a period, and repeats on."""
        start = find_continuation(tokens, self.shortest, self.longest)
        if start is None:
            return []
        return np.resize(tokens[start : start + self.num_tokens], self.num_tokens).tolist()

    def propose_batch(self, batch: InputBatch, rows: list[int], step: int) -> dict[str, list[int]]:
        """Drafts for the next step, of those `rows` that may have some: request id -> token ids."""
        drafts: dict[str, list[int]] = {}
        for row in rows:
            if needs_history(batch.requests[row].sampling_params):
                continue  # drafts are sampled before it is known which are kept
            proposed = self.propose(batch.token_ids[row, : batch.num_tokens[row]])
            if proposed:
                drafts[batch.request_ids[row]] = proposed
                if trace.on:
                    token_ids = proposed if trace.prompts else []
                    trace.emit(
                        "spec.proposed", req=batch.request_ids[row], step=step,
                        num_tokens=len(proposed), token_ids=token_ids,
                    )  # fmt: skip
        return drafts


class NgramHook(RunnerHook):
    """Installed with `--speculative-config`: verifies the drafts of a step, and proposes those of the next."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.rows_per_request = 1 + config.speculative_config.num_speculative_tokens
        self._proposer = NgramProposer(config.speculative_config)
        self._drafts: dict[str, list[int]] = {}  # of the current step

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Drafts are inputs of the step after the known tokens; they are not known tokens yet."""
        batch, scheduled = self.runner.batch, SCHEDULED_DRAFTS.of(scheduler_output.extras)
        self._drafts = scheduled.token_ids if scheduled else {}
        for request_id, draft in self._drafts.items():
            row = batch.row_of[request_id]
            start = batch.num_tokens[row]
            batch.token_ids[row, start : start + len(draft)] = draft

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """With k drafts a request has k + 1 rows of logits."""
        if not self._drafts:
            return
        batch, starts = self.runner.batch, inputs.metadata.query_start_loc_cpu
        sampled, rows = set(inputs.sampled), list[int]()
        indices, ahead = list[int](), list[int]()
        for place, request_id in enumerate(scheduler_output.num_scheduled_tokens):
            row, num_drafts = batch.row_of[request_id], len(self._drafts.get(request_id, ()))
            if row in sampled:
                indices += range(starts[place + 1] - num_drafts - 1, starts[place + 1])
                rows += [row] * (num_drafts + 1)
                ahead += range(num_drafts + 1)
        inputs.logits_indices = to_device([np.array(indices)], self.runner.device)[0]
        inputs.sampled, inputs.ahead = rows, ahead

    def after_sample(self, sampled: dict[str, list[int]], output: SamplerOutput, inputs: StepInputs) -> None:
        """Keep the accepted drafts, and one token more. The keys and values of the rejected ones count as not computed, and
        blocks that held nothing else are dropped (the scheduler frees them by the same rule)."""
        if not self._drafts:
            return
        batch, drafts = self.runner.batch, [self._drafts.get(request_id, []) for request_id in sampled]
        for request_id, draft, kept in zip(sampled, drafts, num_accepted(output.sampled_token_ids, drafts)):
            del sampled[request_id][kept + 1 :]
            row = batch.row_of[request_id]
            batch.num_computed[row] -= len(draft) - kept
            batch.num_blocks[row] = min(batch.num_blocks[row], cdiv(int(batch.num_computed[row]), batch.block_size))

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """Drafts for the next step."""
        rows = [self.runner.batch.row_of[request_id] for request_id in output.sampled_token_ids]
        drafts = self._proposer.propose_batch(self.runner.batch, rows, scheduler_output.step)
        for request_id, token_ids in drafts.items():
            output.add(request_id, NEXT_DRAFTS, NextDrafts(token_ids))
