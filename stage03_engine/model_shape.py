"""The size and the kind of a model: what its config.json says (`hf_config.py` reads it), and the shapes of well-known models.

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


_LLAMA_3_2_1B = ModelShape(
    "LlamaForCausalLM", 128256, 16, 32, 8, 64, 2048, 8192, 131072, torch_dtype="bfloat16", eos_token_id=128001,
    rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
)  # fmt: skip
_QWEN3_0_6B = ModelShape(
    "Qwen3ForCausalLM", 151936, 28, 16, 8, 128, 1024, 3072, 40960, torch_dtype="bfloat16", eos_token_id=151645,
    more_eos_token_ids=(151643,), rope_theta=1000000.0, qk_norm=True,
)  # fmt: skip

KNOWN_SHAPES = {
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "meta-llama/Llama-3.2-1B": _LLAMA_3_2_1B,
    "Qwen/Qwen3-0.6B": _QWEN3_0_6B,
    "Qwen/Qwen2.5-0.5B": ModelShape(
        "Qwen2ForCausalLM", 151936, 24, 14, 2, 64, 896, 4864, 32768, torch_dtype="bfloat16", eos_token_id=151643,
        rope_theta=1000000.0, attention_bias=True,
    ),
    "mistralai/Mistral-7B-v0.1": ModelShape(
        "MistralForCausalLM", 32000, 32, 32, 8, 128, 4096, 14336, 32768, torch_dtype="bfloat16", eos_token_id=2,
        rms_norm_eps=1e-5, sliding_window=4096, sliding_layers=tuple(range(32)), tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Shapes that `--load-format dummy` knows without any file. Sources: table 2 of the GPT-2 paper (Radford et al. 2019), and
the published config.json of the others."""
