"""EAGLE: one layer that continues the target's hidden states, and drafts from them (vllm/v1/spec_decode/eagle.py,
vllm/model_executor/models/llama_eagle.py; Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty").

    position p | fc(embedding of token p + 1, hidden state of p) | a layer over positions 0 .. p | the target's output matrix: token p + 2

What it gives is its guess at the target's hidden state of position p + 1, after the final norm. So it goes on without the target: its own state
takes the place of the next one, and its own guess that of the next token.

    end of a step   | the positions that the target computed, and whose next token is known: keys and values from its hidden states |
    the next step   | the guess after the newest of them, and k - 1 passes of one position each | the target's pass over k + 1 tokens |

Its keys and values lie in the target's blocks, at the same slots of tensors of its own, as a second model's do (draft_model.py). But those of a
position depend on the token after it: so a block is found again only by requests that go on with the same token (`block_hash_lookahead`). vLLM
finds it by its own tokens, and drops the last block of each hit.

    Invariant: after each step the head has the keys and values of every position that the target has, and whose next token is known, in its context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.llama.llama import LlamaDecoderLayer, frequencies_of
from stage03_engine.core.features.spec_decode.eagle_config import own_name
from stage03_engine.core.features.spec_decode.heads import HeadsHook
from stage03_engine.core.input_batch import StepInputs, gather_inputs
from stage03_engine.core.model_runner import ModelRunner, zeros
from stage03_engine.core.models.layers import Linear, assign_weights, embedding
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.features.rope import rope_cos_sin
from stagetrace import trace


class NoNorm(nn.Module):
    """In the place of the first layer's norm."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x, x


class EagleHead(nn.Module):
    """`fc`, and a Llama's layers, the first without a norm before its attention; no norm at the end. Without an embedding of its own it is given the
    target's."""

    frequencies: Tensor

    def __init__(
        self, shape: ModelShape, backend: str, bias: bool, own_embedding: bool, logit_scale: float
    ) -> None:  # fmt: skip
        super().__init__()
        self.logit_scale = logit_scale
        self.embed_tokens = embedding(shape.vocab_size, shape.hidden_size) if own_embedding else None
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size, bias)
        self.layers = nn.ModuleList(LlamaDecoderLayer(shape, layer, backend) for layer in range(shape.num_layers))
        self.layers[0].input_layernorm = NoNorm()
        self.register_buffer("frequencies", frequencies_of(shape), persistent=False)

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:  # fmt: skip
        """embedded: of each position's next token, features: each position's hidden state, both [num_tokens, hidden_size]. Returns a guess at the next
        position's, of the same shape."""
        x, residual = self.fc(torch.cat((embedded, features), dim=-1)), None
        rotation = rope_cos_sin(positions, self.frequencies)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, rotation, kv_cache, metadata)
        return x + residual

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Assign a checkpoint's tensors. Raises ConfigError if it does not fit."""
        assign_weights(self, tensors, own_name)


class EagleHook(HeadsHook):
    """Installed with `--speculative-config` and an EAGLE head. Of each request it keeps the head's state at the newest position."""

    heads: EagleHead

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        self.shape = msgspec.convert(config.speculative_config.draft_shape, ModelShape)
        super().__init__(runner, config)
        self._embedding: nn.Module | None = None
        self._hidden: Tensor | None = None  # the target's, of the step, [num_tokens, hidden_size]
        self._places: dict[
            str, tuple[int, int]
        ] = {}  # request id -> where in it its tokens begin, and the position of the first
        self._states: dict[
            str, Tensor
        ] = {}  # request id -> [hidden_size], the head's, which its first draft follows from

    # Start

    def make_heads(self, **sizes: Any) -> EagleHead:
        """One."""
        return EagleHead(self.shape, self.config.device_config.attention_backend, **sizes)

    def new_kv_caches(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """Room for so many of its blocks, in the number format of --dtype."""
        size = (2, num_blocks, self.runner.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        return [zeros(size, self.runner.dtype, device) for _ in range(self.shape.num_layers)]

    def cache_allocated(self, num_blocks: int) -> None:
        """As many blocks as the target has, whose model is as it will run by now: several workers share its embedding. Raises ConfigError for a target
        whose embedding is not found."""
        self.kv_caches = self.new_kv_caches(num_blocks, self.runner.device)
        named = {name.rpartition(".")[2]: module for name, module in self.runner.model.named_modules()}
        self._embedding = self.heads.embed_tokens or named.get("wte", named.get("embed_tokens"))
        if self._embedding is None:
            raise ConfigError(
                "speculative_config: the head has no embed_tokens of its own, and the target none that it could share"
            )

    # A step

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        super().forget(request_id)
        self._states.pop(request_id, None)

    def draft_tokens(
        self, lengths: dict[str, int], drafts: dict[str, list[int]], scheduler_output: SchedulerOutput
    ) -> int:
        """The first draft follows from the states that are there, each further one from a pass over the one before."""
        batch, names = self.runner.batch, list(lengths)
        states = [self._states[name] for name in names]
        for ahead in range(max(lengths.values(), default=0)):
            chosen = [place for place, name in enumerate(names) if lengths[name] > ahead]
            names = [names[place] for place in chosen]
            ends = batch.num_tokens[[batch.row_of[name] for name in names]] - 1 + ahead
            features = torch.stack([states[place] for place in chosen])
            if ahead == 0:
                inputs = self._inputs(names, ends - 1, ends)
            else:
                features, inputs = self._run(names, ends - 1, ends, features)
            inputs.ahead, states = [ahead] * len(names), list(features)
            logits = self.runner.model.compute_logits(features) * self.heads.logit_scale
            self.choose(logits, inputs, drafts, scheduler_output)
        return max(lengths.values(), default=0)

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """Kept until the step is over: then it is known which of its tokens stand."""
        batch, starts = self.runner.batch, inputs.metadata.query_start_loc_cpu
        self._hidden, self._places = hidden, {}
        for start, (request_id, count) in zip(starts, scheduler_output.num_scheduled_tokens.items()):
            self._places[request_id] = start, int(batch.num_computed[batch.row_of[request_id]]) - count
        return False

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """Catch up with the target, then ask for room for drafts."""
        if self._hidden is not None:
            self._catch_up(self._hidden, scheduler_output)
            self._hidden = None
        super().collect(output, scheduler_output)

    def _catch_up(self, hidden: Tensor, scheduler_output: SchedulerOutput) -> None:
        """One pass over what the target computed in this step and still stands. The next token of a prompt's chunk is the prompt's."""
        batch, names, spans, taken = self.runner.batch, list[str](), list[tuple[int, int]](), list[np.ndarray]()
        for request_id, (start, first) in self._places.items():
            row = batch.row_of[request_id]
            end = min(int(batch.num_computed[row]), int(batch.num_tokens[row]) - 1, self.context)
            if end > first:
                names.append(request_id)
                spans.append((first, end))
                taken.append(np.arange(start, start + end - first))
        if not names:
            return
        at = torch.from_numpy(np.concatenate(taken)).to(self.runner.device)
        firsts, ends = np.array(spans).T
        states, _ = self._run(names, firsts, ends, hidden[at])
        for name, state in zip(names, states):
            self._states[name] = state.clone()  # a view would keep all rows
        if trace.on:
            trace.emit("spec.caught_up", step=scheduler_output.step, rows=len(names), num_tokens=len(at))

    def _run(
        self, names: list[str], firsts: np.ndarray, ends: np.ndarray, features: Tensor
    ) -> tuple[Tensor, StepInputs]:
        """A pass over the positions from `firsts` up to `ends` of each request, with their features [num_tokens, hidden_size]. Returns the state of
        each request's last position [num_reqs, hidden_size], and the inputs."""
        inputs = self._inputs(names, firsts, ends)
        assert self._embedding is not None
        embedded = self._embedding(inputs.input_ids)
        states = self.heads(embedded, features, inputs.positions, self.kv_caches, inputs.metadata)
        return states[inputs.logits_indices], inputs

    def _inputs(self, names: list[str], firsts: np.ndarray, ends: np.ndarray) -> StepInputs:
        """Of these positions, each with the token after it."""
        batch = self.runner.batch
        rows = np.array([batch.row_of[name] for name in names])
        inputs = gather_inputs(batch, rows, firsts, ends, np.arange(len(rows)), self.runner.device)
        next_ids = [batch.token_ids[row, first + 1 : end + 1] for row, first, end in zip(rows, firsts, ends)]
        inputs.input_ids = torch.from_numpy(np.concatenate(next_ids)).to(self.runner.device)
        return inputs

    def shutdown(self) -> None:
        """Release the head."""
        self._states, self._hidden, self._embedding, self.kv_caches = {}, None, None, []
