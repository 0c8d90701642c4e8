"""GPT-2, written out (vllm/model_executor/models/gpt2.py; Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners").

The model sees one flat row of tokens per step, the tokens of all requests one after the other: [num_tokens, hidden_size].
Only attention knows which token belongs to which request, and only through the metadata; every other layer works token by
token. The names of modules and parameters are those of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stage03_engine.core.models.layers import LanguageModel, Linear, assign_weights, embedding
from stage03_engine.model_shape import ModelShape
from stage04_kernels.attention import AttentionMetadata, get_backend
from stage04_kernels.layers import activation, layer_kernels

_CAUSAL_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)$")


class Conv1D(Linear):
    """A linear layer whose weight is stored as [in_features, out_features], as GPT-2's checkpoints do."""

    @property
    def stored_size(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    @property
    def matrix(self) -> Tensor:
        return self.weight.T  # a view: nothing is transposed

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None or self.addends:
            return super().forward(x)  # a feature takes part
        y = F.linear(x, self.weight.T, self.bias)
        return y if self.activation is None else self.activation(y)


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension, of x plus the residual if there is one. Returns (normed, the sum)."""

    def __init__(self, size: int, eps: float, backend: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.eps, self.layer_norm = eps, layer_kernels(backend).layer_norm

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.layer_norm(x, residual, self.weight, self.bias, self.eps)


class GPT2Attention(nn.Module):
    """Queries, keys and values from one matrix; paged attention; output projection."""

    def __init__(self, shape: ModelShape, backend: str, layer: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = shape.num_heads, shape.head_dim
        self.scale = shape.head_dim**-0.5 if shape.scale_attn_weights else 1.0
        if shape.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.attention = get_backend(backend)
        own_size = shape.num_heads * shape.head_dim  # hidden_size, unless the heads are spread over several workers
        self.c_attn = Conv1D(shape.hidden_size, 3 * own_size)
        self.c_proj = Conv1D(own_size, shape.hidden_size)

    def forward(self, x: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        qkv = self.c_attn(x).view(-1, 3, self.num_heads, self.head_dim)  # [num_tokens, 3, num_heads, head_dim]
        query, key, value = qkv.unbind(1)  # each [num_tokens, num_heads, head_dim]
        out = self.attention(query, key, value, kv_cache, metadata, self.scale, None, None)  # no window, no rotation
        return self.c_proj(out.flatten(1))


class GPT2MLP(nn.Module):
    """Widen, the activation (GELU in the tanh approximation, unless the checkpoint names another one), narrow."""

    def __init__(self, shape: ModelShape, backend: str) -> None:
        super().__init__()
        gelu = activation(shape.activation_function, backend)
        self.c_fc = Conv1D(shape.hidden_size, shape.intermediate_size, activation=gelu)
        self.c_proj = Conv1D(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x))


class GPT2Block(nn.Module):
    """Layer norm before each half, residual around it.

    x is what the half before adds to the residual stream; the next norm adds it, in one pass.
    """

    def __init__(self, shape: ModelShape, backend: str, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(shape.hidden_size, shape.layer_norm_epsilon, backend)
        self.attn = GPT2Attention(shape, backend, layer)
        self.ln_2 = LayerNorm(shape.hidden_size, shape.layer_norm_epsilon, backend)
        self.mlp = GPT2MLP(shape, backend)

    def forward(
        self, x: Tensor, residual: Tensor | None, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ln_1(x, residual)
        x, residual = self.ln_2(self.attn(x, kv_cache, metadata), residual)
        return self.mlp(x), residual


class GPT2LMHeadModel(LanguageModel):
    """Token and position embedding, blocks, final norm; the output matrix is the token embedding again (tied weights), or one of its own."""

    def __init__(self, shape: ModelShape, backend: str = "torch") -> None:
        super().__init__()
        self.wte = embedding(shape.vocab_size, shape.hidden_size)
        self.wpe = embedding(shape.max_position_embeddings, shape.hidden_size)
        self.h = nn.ModuleList(GPT2Block(shape, backend, layer) for layer in range(shape.num_layers))
        self.ln_f = LayerNorm(shape.hidden_size, shape.layer_norm_epsilon, backend)
        self.lm_head = None if shape.tie_word_embeddings else embedding(shape.vocab_size, shape.hidden_size)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        x, residual = self.wte(input_ids) + self.wpe(positions), None
        for block, kv_cache in zip(self.h, kv_caches, strict=True):
            x, residual = block(x, residual, kv_cache, metadata)
        return self.ln_f(x, residual)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Only for sampled rows: this is the model's largest matrix."""
        own = self.logits_product
        return (F.linear(hidden_states, self.output_matrix) if own is None else own(hidden_states)).float()

    @property
    def output_matrix(self) -> Tensor:
        """[vocab_size, hidden_size]: hidden states -> logits."""
        return (self.lm_head or self.wte).weight

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        assign_weights(self, tensors, self._parameter_name)

    def _parameter_name(self, name: str) -> str | None:
        """None for what is not needed: stored causal masks, an output matrix that is the token embedding again."""
        again = name == "lm_head.weight" and self.lm_head is None
        return None if again or _CAUSAL_MASKS.search(name) else name.removeprefix("transformer.")
