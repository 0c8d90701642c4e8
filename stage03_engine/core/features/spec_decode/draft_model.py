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
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.draft_model_config import draft_config
from stage03_engine.core.features.spec_decode.drafter import Drafter
from stage03_engine.core.input_batch import StepInputs, gather_inputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage04_kernels.sampler import SamplerOutput


class DraftModelHook(Drafter):
    """Installed with `--speculative-config` and a model: drafts, and verifies the drafts of the same step."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.draft = ModelRunner(draft_config(config), runner.device)
        self.draft.batch = runner.batch  # the tokens and the blocks of the target
        self.context = self.draft.config.max_model_len
        self._computed: dict[str, int] = {}  # request id -> of how many of its tokens the draft has keys and values

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

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        super().forget(request_id)
        self._computed.pop(request_id, None)

    def draft_tokens(
        self, lengths: dict[str, int], drafts: dict[str, list[int]], scheduler_output: SchedulerOutput
    ) -> int:
        """One token after the other."""
        passes = self._follow(lengths, drafts, scheduler_output)
        while self._extend(lengths, drafts, scheduler_output):
            passes += 1
        return passes

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
        return 1 if places else 0

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
        self.choose(logits, inputs, drafts, scheduler_output)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """The draft's hidden states [num_tokens, hidden_size], through the hooks that make it fast."""
        run: Callable[[StepInputs], Tensor] = self.draft.run_model
        for hook in reversed(self.draft.hooks):
            run = partial(hook.forward, run=run)
        return run(inputs)

    def after_sample(self, sampled: dict[str, list[int]], output: SamplerOutput, inputs: StepInputs) -> None:
        """Of the draft's own keys and values, those of rejected drafts do not count either."""
        super().after_sample(sampled, output, inputs)
        for request_id in self.drafts:
            computed = int(self.runner.batch.num_computed[self.runner.batch.row_of[request_id]])
            self._computed[request_id] = min(self._computed[request_id], computed)

    def shutdown(self) -> None:
        """Release the draft."""
        self.draft.shutdown()
        self.kv_caches = []
