"""The size and the kind of a model: what its config.json says (hf_config.py reads it), and the shapes of the GPT-2 family.

With a known shape `--load-format dummy` needs no files at all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How a model's rotary embedding was stretched to a longer context: `linear`, or `llama3` with its three numbers."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """What a model's config.json says about its size (vLLM reads it as hf_config)."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    layer_norm_epsilon: float = 1e-5
    torch_dtype: str = "float32"
    eos_token_id: int | None = None
    more_eos_token_ids: tuple[int, ...] = ()  # some models have several tokens that end a text
    # The Llama family only:
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    sliding_layers: tuple[int, ...] = ()  # the layers to which that applies
    attention_bias: bool = False  # of the query, key and value matrices
    attention_output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    tie_word_embeddings: bool = True  # the output matrix is the token embedding
    multilingual: bool = True  # Whisper only: False for a model that was trained on English alone
    # Models with a classification head only:
    labels: tuple[str, ...] = ()  # the names of the classes, in the order of the head's rows
    label_activation: str = "softmax"  # to probabilities; sigmoid: each class by itself; identity: bare logits


def _gpt2(num_layers: int, num_heads: int, hidden_size: int) -> ModelShape:
    return ModelShape(
        "GPT2LMHeadModel", 50257, num_layers, num_heads, num_heads, hidden_size // num_heads, hidden_size,
        4 * hidden_size, 1024, eos_token_id=50256,
    )  # fmt: skip


KNOWN_SHAPES = {
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
}
"""Shapes that `--load-format dummy` knows without any file: table 2 of the GPT-2 paper (Radford et al. 2019)."""
