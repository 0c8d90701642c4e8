"""The Llama family, written out (vllm/model_executor/models/llama.py, mistral.py, qwen2.py, qwen3.py).

One model, configured by its ModelShape:

    Llama 2, 3   rotary embedding (Llama 3.1 stretches it), several query heads to one key/value head, RMSNorm, SwiGLU
    Mistral      a sliding window in every layer (version 0.1)
    Qwen2        a bias on queries, keys and values; a sliding window in some layers, if any
    Qwen3        an RMSNorm over each head of queries and keys instead; head_dim is free of hidden_size

As in gpt2.py, a step is one flat row of tokens, [num_tokens, hidden_size], and names are those of the checkpoint (without
its leading `model.`). Every matrix is used as it is stored: none is split, fused or transposed, so none is copied (unless `--linear-backend` packs it).
Sources: Touvron et al. 2023; Jiang et al. 2023, "Mistral 7B"; the technical reports of Qwen2 and Qwen3.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stage03_engine.core.models.layers import LanguageModel, Linear, assign_weights, embedding
from stage03_engine.model_shape import ModelShape
from stage04_kernels.attention import AttentionMetadata, get_backend
from stage04_kernels.features.rope import Rotation, rope_cos_sin, rope_frequencies, scale_linear, scale_llama3
from stage04_kernels.layers import layer_kernels


def frequencies_of(shape: ModelShape) -> Tensor:
    """Angles per position of the rotary embedding, float32 [head_dim / 2]."""
    frequencies, scaling = rope_frequencies(shape.head_dim, shape.rope_theta), shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return scale_linear(frequencies, scaling.factor)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return scale_llama3(frequencies, scaling.factor, low, high, scaling.original_max_position_embeddings)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, of x plus the residual if there is one. Returns (normed, the sum)."""

    def __init__(self, size: int, eps: float, backend: str) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps
        self.rms_norm = layer_kernels(backend).rms_norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.rms_norm(x, residual, self.weight, self.eps)


class LlamaAttention(nn.Module):
    """Queries, keys and values, turned by their positions; paged attention; output projection."""

    def __init__(self, shape: ModelShape, layer: int, backend: str) -> None:
        super().__init__()
        self.head_dim, self.scale, self.attention = shape.head_dim, shape.head_dim**-0.5, get_backend(backend)
        self.window = shape.sliding_window if layer in shape.sliding_layers else None
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query_size, shape.attention_bias)
        self.k_proj = Linear(shape.hidden_size, kv_size, shape.attention_bias)
        self.v_proj = Linear(shape.hidden_size, kv_size, shape.attention_bias)
        self.o_proj = Linear(query_size, shape.hidden_size, shape.attention_output_bias)
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps, backend)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps, backend)

    def forward(self, x: Tensor, rotation: Rotation, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        query, key, value = (  # [num_tokens, num_heads or num_kv_heads, head_dim]
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            query, key = self.q_norm(query)[0], self.k_norm(key)[0]
        out = self.attention(query, key, value, kv_cache, metadata, self.scale, self.window, rotation)
        return self.o_proj(out.flatten(1))


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer 2020): a gate and a value, both wide; their product, narrowed."""

    def __init__(self, shape: ModelShape, backend: str) -> None:
        super().__init__()
        self.silu_and_mul = layer_kernels(backend).silu_and_mul
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.silu_and_mul(self.gate_proj(x), self.up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Norm before each half, residual around it; the norm adds the output of the half before, as in gpt2.py."""

    def __init__(self, shape: ModelShape, layer: int, backend: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, backend)
        self.self_attn = LlamaAttention(shape, layer, backend)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, backend)
        self.mlp = LlamaMLP(shape, backend)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, rotation, kv_cache, metadata), residual)
        return self.mlp(x), residual


class LlamaForCausalLM(LanguageModel):
    """Token embedding, layers, final norm; an output matrix of its own, or the token embedding again (tied weights)."""

    frequencies: Tensor

    def __init__(self, shape: ModelShape, backend: str = "torch") -> None:
        super().__init__()
        self.tied = shape.tie_word_embeddings
        self.embed_tokens = embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(shape, n, backend) for n in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, backend)
        if not self.tied:
            self.lm_head = embedding(shape.vocab_size, shape.hidden_size)
        self.register_buffer("frequencies", frequencies_of(shape), persistent=False)  # float32 whatever the weights are

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """input_ids, positions: [num_tokens] int64; kv_caches: one per layer. Returns hidden states [num_tokens, hidden_size]."""
        x, residual = self.embed_tokens(input_ids), None
        rotation = self.rotation(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, rotation, kv_cache, metadata)
        return self.norm(x, residual)[0]

    def rotation(self, positions: Tensor) -> Rotation:
        """The rotary embedding of a step. A model whose positions have several components has its own."""
        return rope_cos_sin(positions, self.frequencies)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, vocab_size]. Only for the rows that are sampled."""
        own = self.logits_product
        return (F.linear(hidden_states, self.output_matrix) if own is None else own(hidden_states)).float()

    @property
    def output_matrix(self) -> Tensor:
        """[vocab_size, hidden_size]: hidden states -> logits."""
        return (self.embed_tokens if self.tied else self.lm_head).weight

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ConfigError for a checkpoint that does not fit."""
        assign_weights(self, tensors, self._parameter_name)

    def _parameter_name(self, name: str) -> str | None:
        """None for what is not a weight: rotary tables of old checkpoints, an output matrix that is the embedding again."""
        if name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight"):
            return None
        return name.removeprefix("model.")
