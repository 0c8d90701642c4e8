"""A second, smaller model that drafts (vllm/v1/spec_decode/draft_model.py, DraftModelProposer; Leviathan et al. 2023, Chen et al. 2023).

    step n    | scheduler: 1 token + room for k drafts | draft: k short passes | target: one pass over k + 1 tokens | keep what is equal |

The draft writes its tokens at the start of the step that verifies them, where the scheduler has just made room. So its keys and values lie
in the target's blocks, at the same slots of tensors of its own, and need no block manager, no lookahead and no second budget.

Which blocks the prefix cache finds again is decided for the target. Hence

    Invariant: after each step a block that is full holds the draft's keys and values too, of every position that the draft's context reaches.

A request without drafts (a step whose budget is used up, one whose logits depend on its history) is followed from block to block; one with
drafts up to its newest token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.draft_model_config import draft_config
from stage03_engine.core.features.spec_decode.draft_scheduler import NEXT_DRAFTS, NextDrafts
from stage03_engine.core.features.spec_decode.verifier import DraftVerifier, needs_history
from stage03_engine.core.input_batch import StepInputs, gather_inputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from stage04_kernels.features.rejection_sampler import propose, reject_rows
from stage04_kernels.sampler import SamplerOutput, SamplingMetadata, sample
from stagetrace import trace

UNKNOWN = -1  # a draft that the scheduler makes room for


def next_length(length: int, drafted: int, accepted: int, most: int) -> int:
    """How many drafts a request gets next, after `accepted` of `drafted` were accepted: one more than that, so that it costs at most one pass for nothing
    where the text stays as hard as it was, and rises where it gets easier. `length` is what it had; fewer were drafted if there was no room."""
    if accepted == drafted:
        return max(length, min(most, drafted + 1))
    return accepted + 1


class DraftModelHook(DraftVerifier):
    """Installed with `--speculative-config` and a model: drafts, and verifies the drafts of the same step."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.draft = ModelRunner(draft_config(config), runner.device)
        self.draft.batch = runner.batch  # the tokens and the blocks of the target
        self.most = config.speculative_config.num_speculative_tokens
        self.by_batch_size = config.speculative_config.num_speculative_tokens_per_batch_size
        self.method = config.speculative_config.draft_sample_method
        self.adaptive = config.speculative_config.adaptive_num_speculative_tokens
        self.context = self.draft.config.max_model_len
        self._computed: dict[str, int] = {}  # request id -> of how many of its tokens the draft has keys and values
        self._before: tuple[list[int], SamplingMetadata] | None = (
            None  # of the pass before: its rows, how they were sampled
        )
        self._lengths: dict[str, int] = {}  # request id -> how many drafts it is worth, if not the most
        self._probs: dict[str, list[Tensor]] = {}  # probabilistic: what each draft of the step was drawn from, [vocab]

    # Start

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The draft is loaded beside it."""
        self.draft.load_model()
        return model

    def reserved_bytes(self) -> int:
        """What the draft's own hooks take."""
        return sum(hook.reserved_bytes() for hook in self.draft.hooks)

    def new_kv_caches(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """Room for so many of its blocks."""
        return self.draft.new_kv_caches(num_blocks, device)

    def cache_allocated(self, num_blocks: int) -> None:
        """As many blocks as the target has."""
        self.draft.initialize_kv_cache(num_blocks)
        self.kv_caches = self.draft.kv_caches

    # Requests

    def request_added(self, new: NewRequestData) -> None:
        """The blocks that it begins with are full, or were its own before it was preempted."""
        known = self._computed.get(new.request_id, new.num_computed_tokens)
        self._computed[new.request_id] = min(known, new.num_computed_tokens)

    # A step

    def drafted(self, scheduled: dict[str, list[int]], scheduler_output: SchedulerOutput) -> dict[str, list[int]]:
        """Write the drafts that the scheduler has made room for."""
        for request_id in scheduler_output.finished_req_ids:
            if request_id not in self.runner.batch.row_of:
                self._computed.pop(request_id, None)
                self._lengths.pop(request_id, None)
        lengths = {request_id: len(places) for request_id, places in scheduled.items()}
        drafts: dict[str, list[int]] = {request_id: [] for request_id in lengths}
        self._probs, self._before = {request_id: [] for request_id in lengths}, None
        passes = self._follow(lengths, drafts, scheduler_output)
        while self._extend(lengths, drafts, scheduler_output):
            passes += 1
        if trace.on and drafts:
            trace.emit(
                "spec.drafted", step=scheduler_output.step, rows=len(drafts), num_tokens=sum(lengths.values()), passes=passes
            )  # fmt: skip
        return drafts

    def _follow(self, lengths: dict[str, int], drafts: dict[str, list[int]], scheduler_output: SchedulerOutput) -> int:
        """The first pass: what the target knows, or computes in this step, and the draft does not have yet; and from there the first draft.
        Returns the number of passes, 1 or 0."""
        batch, places = self.runner.batch, list[tuple[str, int, int]]()
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            end = int(batch.num_computed[batch.row_of[request_id]]) + count - lengths.get(request_id, 0)
            if request_id not in lengths:
                end = end // batch.block_size * batch.block_size
            end = min(end, self.context)
            if end > (first := self._computed[request_id]):
                places.append((request_id, first, end))
                self._computed[request_id] = end
        self._run(places, [i for i, place in enumerate(places) if place[0] in lengths], drafts, scheduler_output)
        return bool(places)

    def _extend(self, lengths: dict[str, int], drafts: dict[str, list[int]], scheduler_output: SchedulerOutput) -> bool:
        """A pass of one token per request, its newest draft: the next draft follows from it. The last draft is computed only if it fills
        its block. Returns False when there is nothing left to do."""
        batch, places, sampled = self.runner.batch, list[tuple[str, int, int]](), list[int]()
        for request_id, draft in drafts.items():
            end = self._computed[request_id] + 1
            written = int(batch.num_tokens[batch.row_of[request_id]]) + len(draft)
            if len(draft) < lengths[request_id]:
                sampled.append(len(places))
            elif end > written or end % batch.block_size or end > self.context:
                continue
            places.append((request_id, end - 1, end))
            self._computed[request_id] = end
        self._run(places, sampled, drafts, scheduler_output)
        return bool(places)

    def _run(
        self, places: list[tuple[str, int, int]], sampled: list[int], drafts: dict[str, list[int]],
        scheduler_output: SchedulerOutput,
    ) -> None:  # fmt: skip
        """Run the draft over the tokens from the second to the third of each place, and add a draft to those that `sampled` counts."""
        if not places:
            return
        batch, device = self.runner.batch, self.runner.device
        names, firsts, ends = zip(*places)
        rows = np.array([batch.row_of[name] for name in names])
        inputs = gather_inputs(batch, rows, np.array(firsts), np.array(ends), np.array(sampled, dtype=np.int64), device)
        hidden = self._forward(inputs)
        if not sampled:
            return
        inputs.ahead = [len(drafts[names[place]]) for place in sampled]
        logits = self.draft.model.compute_logits(hidden[inputs.logits_indices])
        token_ids, probs = self._choose(logits, self._settings(inputs, scheduler_output))
        for number, place in enumerate(sampled):
            name, row, ahead = names[place], inputs.sampled[number], inputs.ahead[number]
            drafts[name].append(token_ids[number])
            batch.token_ids[row, batch.num_tokens[row] + ahead] = token_ids[number]
            if probs is not None:
                self._probs[name].append(probs[number])

    def _choose(self, logits: Tensor, metadata: SamplingMetadata) -> tuple[list[int], Tensor | None]:
        """A draft for each row of logits, and for the textbook's rejection what it was drawn from."""
        if self.method == "probabilistic":
            tokens, probs = propose(logits, metadata)
            return tokens.tolist(), probs
        return sample(logits, metadata, self.config.device_config.attention_backend).sampled_token_ids.tolist(), None

    def _forward(self, inputs: StepInputs) -> Tensor:
        """The draft's hidden states [num_tokens, hidden_size], through the hooks that make it fast."""
        run: Callable[[StepInputs], Tensor] = self.draft.run_model
        for hook in reversed(self.draft.hooks):
            run = partial(hook.forward, run=run)
        return run(inputs)

    def _settings(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> SamplingMetadata:
        """How the draft is sampled: as the target. Coupled, that goes down to the noise, which depends on the request's seed and the position:
        where both models agree on the probabilities they draw the same token, at any temperature."""
        if self.method == "greedy":
            return SamplingMetadata.greedy(len(inputs.sampled), self.runner.device)
        before, self._before = self._before, None
        if before is not None and before[0] == inputs.sampled:  # the pass before, one token on
            seeds, positions = before[1].noise_keys
            self._before = inputs.sampled, replace(before[1], noise_keys=(seeds, positions + 1))
            return self._before[1]
        metadata = self.runner.sampling_metadata(inputs)
        for hook in self.runner.hooks:
            if hook is not self and not hook.observes:
                metadata = hook.sampling_metadata(metadata, inputs, scheduler_output)
        metadata = replace(metadata, max_num_logprobs=None, named={})
        if metadata.rules is None:
            self._before = inputs.sampled, metadata
        return metadata

    def sampling_metadata(
        self, metadata: SamplingMetadata, inputs: StepInputs, scheduler_output: SchedulerOutput
    ) -> SamplingMetadata:
        """Probabilistic: positions with a draft are not sampled, the textbook decides about them. The transform comes after the rules, and
        logprobs are taken before it."""
        if self.method != "probabilistic" or not self.drafts:
            return metadata
        names = [self.runner.batch.request_ids[row] for row in inputs.sampled]
        places = list(zip(names, inputs.ahead, strict=True))
        rows = [row for row, (name, ahead) in enumerate(places) if ahead < len(self.drafts.get(name, ()))]
        probs = torch.stack([self._probs[places[row][0]][places[row][1]] for row in rows])
        drafts = torch.tensor([self.drafts[places[row][0]][places[row][1]] for row in rows], device=probs.device)

        def textbook(logits: Tensor, _: list[int]) -> Tensor:
            return reject_rows(logits, metadata, rows, probs, drafts)

        return replace(metadata, before=[*metadata.before, textbook])

    def after_sample(self, sampled: dict[str, list[int]], output: SamplerOutput, inputs: StepInputs) -> None:
        """Of the draft's own keys and values, those of rejected drafts do not count either."""
        super().after_sample(sampled, output, inputs)
        for request_id, draft in self.drafts.items():
            computed = int(self.runner.batch.num_computed[self.runner.batch.row_of[request_id]])
            self._computed[request_id] = min(self._computed[request_id], computed)
            if self.adaptive:
                length = self._lengths.get(request_id, self.most)
                self._lengths[request_id] = next_length(length, len(draft), len(sampled[request_id]) - 1, self.most)

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """Ask for room for drafts in the next step; which ones they are, it will say then."""
        batch = self.runner.batch
        for request_id in output.sampled_token_ids:
            row = batch.row_of[request_id]
            wanted = min(self._wanted(len(batch.requests)), self._lengths.get(request_id, self.most))
            count = min(wanted, self.context - int(batch.num_tokens[row]))
            if count <= 0 or needs_history(batch.requests[row].sampling_params):
                continue
            output.add(request_id, NEXT_DRAFTS, NextDrafts([UNKNOWN] * count))
            if trace.on:
                trace.emit(
                    "spec.proposed", req=request_id, step=scheduler_output.step, num_tokens=count, token_ids=[]
                )  # fmt: skip

    def _wanted(self, batch_size: int) -> int:
        """How many drafts per request, with so many requests."""
        return next((count for low, high, count in self.by_batch_size if low <= batch_size <= high), self.most)

    def shutdown(self) -> None:
        """Release the draft."""
        self.draft.shutdown()
        self.kv_caches = []
