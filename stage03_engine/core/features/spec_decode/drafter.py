"""What drafts when the scheduler has made room: how many tokens a request is worth, and how they are drawn (vllm/v1/spec_decode/llm_base_proposer.py).

In the step before, it asks for room; which drafts they are, it says in the step that verifies them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.draft_scheduler import NEXT_DRAFTS, NextDrafts
from stage03_engine.core.features.spec_decode.verifier import DraftVerifier, needs_history
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
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


class Drafter(DraftVerifier):
    """Drafts, and verifies the drafts of the same step. Its subclasses have the logits."""

    context: int  # up to how many tokens of a request it drafts

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.most = config.speculative_config.num_speculative_tokens
        self.by_batch_size = config.speculative_config.num_speculative_tokens_per_batch_size
        self.method = config.speculative_config.draft_sample_method
        self.adaptive = config.speculative_config.adaptive_num_speculative_tokens
        self._lengths: dict[str, int] = {}  # request id -> how many drafts it is worth, if not the most
        self._probs: dict[str, list[Tensor]] = {}  # probabilistic: what each draft of the step was drawn from, [vocab]
        self._before: tuple[list[int], SamplingMetadata] | None = None  # the rows before, and how they were sampled

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._lengths.pop(request_id, None)

    def draft_tokens(
        self, lengths: dict[str, int], drafts: dict[str, list[int]], scheduler_output: SchedulerOutput
    ) -> int:
        """Fill `drafts` up to these lengths, by `choose`. Returns how many passes that took."""
        raise NotImplementedError

    # A step

    def drafted(self, scheduled: dict[str, list[int]], scheduler_output: SchedulerOutput) -> dict[str, list[int]]:
        """Write the drafts that the scheduler has made room for."""
        for request_id in scheduler_output.finished_req_ids:
            if request_id not in self.runner.batch.row_of:
                self.forget(request_id)
        lengths = {request_id: len(places) for request_id, places in scheduled.items()}
        drafts: dict[str, list[int]] = {request_id: [] for request_id in lengths}
        self._probs, self._before = {request_id: [] for request_id in lengths}, None
        passes = self.draft_tokens(lengths, drafts, scheduler_output)
        if trace.on and drafts:
            trace.emit(
                "spec.drafted", step=scheduler_output.step, rows=len(drafts), num_tokens=sum(lengths.values()), passes=passes
            )  # fmt: skip
        return drafts

    def choose(
        self, logits: Tensor, inputs: StepInputs, drafts: dict[str, list[int]], scheduler_output: SchedulerOutput
    ) -> None:
        """A draft from each row of logits [num_rows, vocab], those of `inputs.sampled`, each `inputs.ahead` tokens on."""
        batch = self.runner.batch
        token_ids, probs = self._chosen(logits, self._settings(inputs, scheduler_output))
        for number, (row, ahead) in enumerate(zip(inputs.sampled, inputs.ahead, strict=True)):
            name = batch.request_ids[row]
            drafts[name].append(token_ids[number])
            batch.token_ids[row, batch.num_tokens[row] + ahead] = token_ids[number]
            if probs is not None:
                self._probs[name].append(probs[number])

    def _chosen(self, logits: Tensor, metadata: SamplingMetadata) -> tuple[list[int], Tensor | None]:
        """A draft for each row of logits, and for the textbook's rejection what it was drawn from."""
        if self.method == "probabilistic":
            tokens, probs = propose(logits, metadata)
            return tokens.tolist(), probs
        return sample(logits, metadata, self.config.device_config.attention_backend).sampled_token_ids.tolist(), None

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
        """How many drafts a request is worth next."""
        super().after_sample(sampled, output, inputs)
        if self.adaptive:
            for request_id, draft in self.drafts.items():
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
