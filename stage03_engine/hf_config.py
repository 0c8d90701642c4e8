"""From config.json to ModelShape (vllm/transformers_utils/config.py; the classes of transformers that read the same file).

Whatever changes a model's mathematics is read here, or refused by name: a key that were ignored would give wrong tokens
silently. Keys that are missing have the value that transformers gives them. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from stage03_engine.errors import ConfigError
from stage03_engine.model_labels import CLASSIFIER, classifier_name, generator_name, with_labels
from stage03_engine.model_shape import ModelShape, RopeScaling

MAX_LAYERS = 1024  # several times as many as any model has; each takes memory before the weights are looked at


class Config:
    """The content of one config.json, read key by key. Every method raises ConfigError that names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, read_json(path)

    def refuse(self, message: str) -> NoReturn:
        """Raise ConfigError about this file."""
        raise ConfigError(f"{self.path}: {message}")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer. A missing key, or null, has the default if there is one."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < 2**31:
            self.refuse(f"{key} must be a positive integer, not {value!r}")
        return value

    def epsilon(self, key: str, default: float) -> float:
        """A number between 0 and 1."""
        value = self.values.get(key, default)
        if type(value) is not float or not 0 < value < 1:
            self.refuse(f"{key} must be a number between 0 and 1, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key, default)
        if type(value) is not bool:
            self.refuse(f"{key} must be true or false, not {value!r}")
        return value

    def only(self, fixed: dict[str, tuple[Any, ...]]) -> None:
        """Refuse every other value of these keys."""
        for key, allowed in fixed.items():
            if key in self.values and self.values[key] not in allowed:
                self.refuse(f"{key} = {self.values[key]!r} is not supported; only {allowed[0]!r} is")

    def dtype(self) -> str:
        """The number format of the weights."""
        value = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        if value not in ("float32", "float16", "bfloat16"):
            self.refuse(f"number format {value!r} is not supported; float32, float16 and bfloat16 are")
        return value

    def eos(self) -> tuple[int, ...]:
        """The ids that end a text: one, several, or none."""
        value = self.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
            self.refuse(f"eos_token_id must be an integer or a list of integers, not {value!r}")
        return tuple(dict.fromkeys(ids))


_GPT2_FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""Keys that change GPT-2's mathematics, and the values that are built."""


def _read_gpt2(config: Config, architecture: str) -> ModelShape:
    config.only(_GPT2_FIXED)
    context_key = "n_ctx" if "n_positions" not in config.values and "n_ctx" in config.values else "n_positions"
    intermediate_size = config.size("n_inner", 4 * config.size("n_embd"))
    keys = ("n_embd", "n_head", "n_layer", context_key)
    shape = _plain_shape(config, architecture, intermediate_size, *keys)
    return replace(shape, layer_norm_epsilon=config.epsilon("layer_norm_epsilon", 1e-5))


def _plain_shape(
    config: Config,
    architecture: str,
    intermediate_size: int,
    hidden_key: str,
    heads_key: str,
    layers_key: str,
    context_key: str,
) -> ModelShape:
    """A decoder whose heads divide the hidden size among them and share no keys."""
    hidden_size, num_heads = config.size(hidden_key), config.size(heads_key)
    if hidden_size % num_heads:
        config.refuse(f"{hidden_key} = {hidden_size} is not a multiple of {heads_key} = {num_heads}")
    return ModelShape(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        num_layers=config.size(layers_key),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        max_position_embeddings=config.size(context_key),
    )


_LLAMA_FIXED = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
"""The same for the Llama family."""


def _read_llama(config: Config, architecture: str) -> ModelShape:
    config.only(_LLAMA_FIXED)
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


def _read_whisper(config: Config, architecture: str) -> ModelShape:
    """Of the decoder: the encoder's sizes are transformers' business, which runs the model."""
    keys = ("d_model", "decoder_attention_heads", "decoder_layers", "max_target_positions")
    shape = _plain_shape(config, architecture, config.size("decoder_ffn_dim"), *keys)
    generation = config.path.with_name("generation_config.json")
    english_only = generation.is_file() and Config(generation).values.get("is_multilingual") is False
    return replace(shape, multilingual=not english_only)


_READERS: dict[str, tuple[str, Callable[[Config, str], ModelShape]]] = {
    "GPT2LMHeadModel": ("gpt2", _read_gpt2),
    "LlamaForCausalLM": ("llama", _read_llama),
    "MistralForCausalLM": ("mistral", _read_llama),
    "Qwen2ForCausalLM": ("qwen2", _read_llama),
    "Qwen3ForCausalLM": ("qwen3", _read_llama),
    "GPT2ForSequenceClassification": ("gpt2", _read_gpt2),
    "LlamaForSequenceClassification": ("llama", _read_llama),
    "MistralForSequenceClassification": ("mistral", _read_llama),
    "Qwen2ForSequenceClassification": ("qwen2", _read_llama),
    "Qwen3ForSequenceClassification": ("qwen3", _read_llama),
    "WhisperForConditionalGeneration": ("whisper", _read_whisper),
}
"""Architecture -> (the model_type that means the same, what reads its config.json)."""

SUPPORTED_ARCHITECTURES = tuple(_READERS)


def read_shape(folder: str | os.PathLike[str]) -> ModelShape:
    """The shape in a folder's config.json, with the end-of-text ids of its generation_config.json added if there is one.

    Raises ConfigError that names the file and the key.
    """
    config = Config(Path(folder) / "config.json")
    architecture = _architecture(config)
    eos, generation = config.eos(), config.path.with_name("generation_config.json")
    if generation.is_file():
        eos = tuple(dict.fromkeys((*eos, *Config(generation).eos())))
    shape = _READERS[architecture][1](config, generator_name(architecture))
    if shape.num_layers > MAX_LAYERS:
        config.refuse(f"{shape.num_layers} layers are more than {MAX_LAYERS}, the most that a model may have here")
    shape = replace(
        shape,
        torch_dtype=config.dtype(),
        eos_token_id=eos[0] if eos else None,
        more_eos_token_ids=eos[1:],
    )
    return with_labels(shape, config) if architecture.endswith(CLASSIFIER) else shape


def classifier_shape(shape: ModelShape, folder: str | None) -> ModelShape:
    """The shape of any model that can have a classification head as that of a classifier. Raises ConfigError."""
    if shape.labels or classifier_name(shape.architecture) not in _READERS:
        return shape
    return with_labels(shape, None if folder is None else Config(Path(folder) / "config.json"))


def _architecture(config: Config) -> str:
    model_type = config.values.get("model_type")
    named = config.values.get("architectures") or [name for name, (kind, _) in _READERS.items() if kind == model_type]
    architecture = str(named[0]) if isinstance(named, (list, tuple)) and named else "none"
    if architecture not in _READERS:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        config.refuse(f"architecture {architecture} is not supported; supported: {supported}")
    return architecture


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content
