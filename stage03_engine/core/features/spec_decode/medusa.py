"""Medusa: heads on the target's last hidden state, each of which guesses one token (vllm/model_executor/models/medusa.py (0.11),
vllm/v1/spec_decode/medusa.py (0.11); Cai et al. 2024).

    hidden state of position t | output matrix: token t + 1 | head 0: token t + 2 | head 1: token t + 3 | ...

A head knows neither token t + 1 nor what the heads before it guess: that makes it cheap, one pass for all, without keys and values, and the later heads
poor guessers. The paper checks a tree of several guesses per head; here, as in vLLM, it is a chain of one each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.heads import HeadsHook
from stage03_engine.core.features.spec_decode.medusa_config import own_name
from stage03_engine.core.input_batch import StepInputs, gather_inputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import assign_weights
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.errors import ConfigError
from stage04_kernels.sampler import SamplerOutput


class ResidualBlock(nn.Module):
    """x + silu(linear(x)), for each layer."""

    def __init__(self, hidden_size: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """num_heads blocks, and an output matrix for each, or one for all. With a `token_map` [kept_vocab_size] they know the tokens in it only."""

    def __init__(
        self, hidden_size: int, vocab_size: int, num_heads: int, num_layers: int, bias: bool, one_output_matrix: bool,
        kept_vocab_size: int, logit_scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vocab_size, self.kept_vocab_size, self.logit_scale = vocab_size, kept_vocab_size, logit_scale
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size, num_layers, bias) for _ in range(num_heads))
        matrices = 1 if one_output_matrix else num_heads
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, kept_vocab_size, bias=False) for _ in range(matrices))
        self.token_map: Tensor | None
        self.register_buffer("token_map", None, persistent=False)

    def compute_logits(self, hidden_states: Tensor, head: int) -> Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, vocab_size]: what head `head` says about the token head + 2 positions on."""
        matrix = self.lm_heads[head if len(self.lm_heads) > 1 else 0]
        logits = matrix(self.blocks[head](hidden_states)).float() * self.logit_scale
        if self.token_map is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.token_map, logits)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Assign a checkpoint's tensors. Raises ConfigError if it does not fit."""
        named = {own_name(name): tensor for name, tensor in tensors}
        token_map = named.pop("token_map", None)
        if self.kept_vocab_size < self.vocab_size:
            self.token_map = self._checked(token_map)
            for name, tensor in named.items():
                if name.startswith("lm_heads.") and len(tensor) == self.vocab_size:
                    named[name] = tensor[self.token_map]
        assign_weights(self, named.items(), lambda name: name)

    def _checked(self, token_map: Tensor | None) -> Tensor:
        """[kept_vocab_size] int64. Raises ConfigError."""
        tokens = None if token_map is None or token_map.is_floating_point() else token_map.long()
        fits = tokens is not None and list(tokens.shape) == [self.kept_vocab_size]
        if tokens is None or not fits or not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ConfigError(f"token_map must be {self.kept_vocab_size} token ids below {self.vocab_size}")
        return tokens


class MedusaHook(HeadsHook):
    """Installed with `--speculative-config` and Medusa heads. Of each request it keeps the hidden state that its newest token was sampled from."""

    heads: MedusaHeads

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._rows = torch.empty(0)  # hidden states of the step's rows of logits, [num_rows, hidden_size]
        self._hidden: dict[str, Tensor] = {}  # request id -> [hidden_size]

    def make_heads(self, **sizes: Any) -> MedusaHeads:
        """A block and an output matrix for each token ahead."""
        return MedusaHeads(**sizes)

    def random(self) -> Iterator[tuple[str, Tensor]]:
        """They know the first tokens, where they do not know all."""
        yield from super().random()
        yield "token_map", torch.arange(self.heads.kept_vocab_size)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        super().forget(request_id)
        self._hidden.pop(request_id, None)

    def draft_tokens(
        self, lengths: dict[str, int], drafts: dict[str, list[int]], scheduler_output: SchedulerOutput
    ) -> int:
        """A head for each place, over the requests that have a draft there."""
        if not lengths:
            return 0
        batch, names = self.runner.batch, list(lengths)
        rows = np.array([batch.row_of[name] for name in names])
        known = batch.num_tokens[rows]
        inputs = gather_inputs(batch, rows, known - 1, known, np.arange(len(rows)), self.runner.device)
        hidden = torch.stack([self._hidden[name] for name in names])
        for head in range(max(lengths.values())):
            chosen = [place for place, name in enumerate(names) if lengths[name] > head]
            own = replace(inputs, sampled=[int(rows[place]) for place in chosen], ahead=[head] * len(chosen))
            self.choose(self.heads.compute_logits(hidden[chosen], head), own, drafts, scheduler_output)
        return 1

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """Copies them: the next step's may lie in the same memory."""
        self._rows = hidden[inputs.logits_indices]
        return False

    def after_sample(self, sampled: dict[str, list[int]], output: SamplerOutput, inputs: StepInputs) -> None:
        """The last token that is kept of a request was sampled from the hidden state of the last draft that stands."""
        counts = [len(token_ids) for token_ids in sampled.values()]
        super().after_sample(sampled, output, inputs)
        first = 0
        for (request_id, token_ids), count in zip(sampled.items(), counts):
            self._hidden[request_id] = self._rows[first + len(token_ids) - 1].clone()  # a view would keep all rows
            first += count

    def shutdown(self) -> None:
        """Release the heads."""
        self._hidden, self._rows = {}, torch.empty(0)
