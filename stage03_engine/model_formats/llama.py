"""The Llama family (Llama, Mistral, Qwen2, Qwen3): its config.json, and the shapes of some well-known models.

Source: the classes of transformers that read the same file. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from stage03_engine.hf_config import Config
from stage03_engine.model_formats.shape_fields import RopeScaling
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import parts

_LLAMA_FIXED = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, None),
}
"""Keys that change the mathematics of the Llama family, and the values that are supported."""
_NOT_QUANTIZED = {"quantization_config": (None,), "compression_config": (None,)}


def read_llama(config: Config, architecture: str) -> ModelShape:
    """Llama, Mistral, Qwen2 and Qwen3 differ in biases, sliding windows and the norm of queries and keys. Raises ConfigError."""
    config.only(_LLAMA_FIXED if parts("engine", "quantized_checkpoints") else _LLAMA_FIXED | _NOT_QUANTIZED)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_layers, qwen2, qwen3 = (
        config.size("num_hidden_layers"),
        architecture[:5] == "Qwen2",
        architecture[:5] == "Qwen3",
    )
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    head_dim = config.size("head_dim", 128 if qwen3 else hidden_size // num_heads or None)
    if num_heads % num_kv_heads:
        config.refuse(f"num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}")
    if head_dim % 2:
        config.refuse(f"head_dim = {head_dim} is odd; rotary embedding turns pairs of numbers")
    bias = not qwen2 and architecture != "MistralForCausalLM" and config.flag("attention_bias", False)
    window, sliding_layers = _sliding_window(config, architecture, num_layers)
    theta, scaling = _rope(config)
    return ModelShape(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        max_position_embeddings=config.size("max_position_embeddings"),
        rms_norm_eps=config.epsilon("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_bias=bias or qwen2,  # Qwen2 always has it, and it has none on the output
        attention_output_bias=bias,
        qk_norm=qwen3,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
    )


def _sliding_window(config: Config, architecture: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(window, layers that have it). Llama has none, Mistral has it everywhere, Qwen in some layers and only when
    `use_sliding_window` says so: the key sliding_window alone means nothing there."""
    if architecture == "LlamaForCausalLM":
        return None, ()
    if architecture == "MistralForCausalLM":
        if config.values.get("sliding_window", 4096) is None:
            return None, ()
        return config.size("sliding_window", 4096), tuple(range(num_layers))
    if not config.flag("use_sliding_window", False) or config.values.get("sliding_window", 4096) is None:
        return None, ()
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            config.refuse(f"max_window_layers must be an integer of at least 0, not {first!r}")
        layers = tuple(range(min(first, num_layers), num_layers))
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
            config.refuse(f"layer_types must list {' or '.join(known)} for each of the {num_layers} layers")
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return (config.size("sliding_window", 4096), layers) if layers else (None, ())


def _positive(config: Config, values: dict[str, Any], key: str, default: float | None = None) -> float:
    value: Any = values.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 1e12:
        config.refuse(f"{key} of the rotary embedding must be a positive number, not {value!r}")
    return float(value)


def _rope(config: Config) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). transformers 5 writes all of it as `rope_parameters`, older versions as two keys."""
    key = "rope_parameters" if config.values.get("rope_parameters") is not None else "rope_scaling"
    given = config.values.get(key)
    if given is None:
        return _positive(config, config.values, "rope_theta", 10000.0), None
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        config.refuse(f"{key} must be one object for all layers, not {given!r}")
    theta = _positive(config, config.values | given, "rope_theta", 10000.0)
    kind = given.get("rope_type", given.get("type", "default" if key == "rope_parameters" else None))
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        config.refuse(f"partial_rotary_factor = {given['partial_rotary_factor']!r} is not supported; only 1.0 is")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _positive(config, given, "factor"))
    if kind != "llama3":
        config.refuse(f"rope_type {kind!r} is not supported; default, linear and llama3 are")
    low, high = (_positive(config, given, f"{name}_freq_factor") for name in ("low", "high"))
    if low >= high:
        config.refuse(f"low_freq_factor = {low} must be less than high_freq_factor = {high}")
    original = given.get("original_max_position_embeddings")
    if type(original) is not int or not 1 <= original < 2**31:
        config.refuse(f"original_max_position_embeddings must be a positive integer, not {original!r}")
    return theta, RopeScaling("llama3", _positive(config, given, "factor"), low, high, original)


KNOWN_SHAPES = {
    "meta-llama/Llama-3.2-1B": ModelShape(
    "LlamaForCausalLM", 128256, 16, 32, 8, 64, 2048, 8192, 131072, torch_dtype="bfloat16", eos_token_id=128001,
    rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
),
    "Qwen/Qwen3-0.6B": ModelShape(
    "Qwen3ForCausalLM", 151936, 28, 16, 8, 128, 1024, 3072, 40960, torch_dtype="bfloat16", eos_token_id=151645,
    more_eos_token_ids=(151643,), rope_theta=1000000.0, qk_norm=True,
),
    "Qwen/Qwen2.5-0.5B": ModelShape(
        "Qwen2ForCausalLM", 151936, 24, 14, 2, 64, 896, 4864, 32768, torch_dtype="bfloat16", eos_token_id=151643,
        rope_theta=1000000.0, attention_bias=True,
    ),
    "mistralai/Mistral-7B-v0.1": ModelShape(
        "MistralForCausalLM", 32000, 32, 32, 8, 128, 4096, 14336, 32768, torch_dtype="bfloat16", eos_token_id=2,
        rms_norm_eps=1e-5, sliding_window=4096, sliding_layers=tuple(range(32)), tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Shapes that `--load-format dummy` knows without any file, from the published config.json of each."""
