"""Log-probabilities of the tokens of a prompt (vLLM: GPUModelRunner._get_prompt_logprobs_dict).

The hidden state of position i predicts token i + 1. Sampling needs the last position only; here every position of the prompt
that a step computes goes through the output matrix too, a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.prompt_logprobs.scheduler_hook import FOUND, Found
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from stage03_engine.messages import TokenLogprobs
from stage04_kernels.sampler import gather_logprobs

MAX_ROWS = 256  # of logits at a time: 50 MB for GPT-2's vocabulary


class PromptLogprobsRunnerHook(RunnerHook):
    """Installed by the first request with `prompt_logprobs`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._asked: dict[str, tuple[int, int]] = {}  # request -> (how many likely tokens, prompt tokens)
        self._found: dict[str, Found] = {}

    def request_added(self, new: NewRequestData) -> None:
        """One that resumes with output has got them already."""
        self._asked.pop(new.request_id, None)
        count, resumes = new.sampling_params.prompt_logprobs, len(new.token_ids) > new.num_prompt_tokens
        if count is not None and not resumes:
            self._asked[new.request_id] = (count, new.num_prompt_tokens)

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Forget requests that ended, unless a new one has the id already."""
        for request_id in scheduler_output.finished_req_ids:
            if request_id not in self.runner.batch.row_of:
                self._asked.pop(request_id, None)

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """For each request that asks: how many prompt tokens come before this step's, and one entry per token that it
        predicts. hidden: [num_tokens, hidden_size]; `batch.num_computed` counts this step already."""
        batch = self.runner.batch
        start = 0  # of the request's tokens in `hidden`
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            if request_id in self._asked:
                row, (num_logprobs, num_prompt_tokens) = batch.row_of[request_id], self._asked[request_id]
                first = int(batch.num_computed[row]) - count
                last = min(first + count, num_prompt_tokens - 1)  # the prompt's last token predicts output
                if first < last:
                    targets = torch.from_numpy(batch.token_ids[row, first + 1 : last + 1]).to(hidden.device)
                    compute_logits: Callable[[Tensor], Tensor] = self.runner.model.compute_logits
                    entries = _gather(hidden[start : start + last - first], targets, num_logprobs, compute_logits)
                    self._found[request_id] = Found(first, entries)
            start += count
        return False

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """What this step found."""
        for request_id, found in self._found.items():
            output.add(request_id, FOUND, found)
        self._found = {}


def _gather(
    states: Tensor, targets: Tensor, num_logprobs: int, compute_logits: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    for some, tokens in zip(states.split(MAX_ROWS), targets.split(MAX_ROWS)):
        ids, logprobs, ranks = gather_logprobs(compute_logits(some), tokens, num_logprobs)
        entries += map(TokenLogprobs, ids.tolist(), logprobs.tolist(), ranks.tolist())
    return entries
