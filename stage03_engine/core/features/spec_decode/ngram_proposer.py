"""Prompt lookup: guess that what followed the last tokens before will follow them again (vllm/v1/spec_decode/ngram_proposer.py).

A summary, an edited text or a chat repeats long stretches of its context. Finding them costs no model at all.
Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

import numpy as np

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.draft_scheduler import NEXT_DRAFTS, NextDrafts
from stage03_engine.core.features.spec_decode.manifest import SpeculativeConfig
from stage03_engine.core.features.spec_decode.verifier import DraftVerifier, needs_history
from stage03_engine.core.input_batch import InputBatch
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
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


class NgramHook(DraftVerifier):
    """Installed with `--speculative-config` and n-grams: verifies the drafts of a step, and proposes those of the next."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._proposer = NgramProposer(config.speculative_config)

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """Drafts for the next step."""
        rows = [self.runner.batch.row_of[request_id] for request_id in output.sampled_token_ids]
        drafts = self._proposer.propose_batch(self.runner.batch, rows, scheduler_output.step)
        for request_id, token_ids in drafts.items():
            output.add(request_id, NEXT_DRAFTS, NextDrafts(token_ids))
