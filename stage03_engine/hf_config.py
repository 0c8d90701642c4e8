"""From config.json to ModelShape (vllm/transformers_utils/config.py; the config classes of transformers).

This module reads GPT-2; features read other architectures. A key that changes a model's mathematics is
read, or refused by name: ignoring it would silently give wrong tokens. A missing key gets transformers' default.
Imports no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import asked, find, keys, wanted

MAX_LAYERS = 1024  # several times as many as any model has; each takes memory before the weights are read


class Config:
    """One config.json, read key by key. Every method raises ConfigError that names the file and the key. `settings` are for the
    features that change what the file says."""

    def __init__(self, path: Path, settings: object = None) -> None:
        self.path, self.values = path, read_json(path)
        for change in asked("engine", "config_json", settings):
            self.values = change(self.values, settings)

    def refuse(self, message: str) -> NoReturn:
        """Raise ConfigError about this file."""
        raise ConfigError(f"{self.path}: {message}")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer. A missing key, or null, means the default if there is one."""
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
        """Refuse any other value of these keys."""
        for key, allowed in fixed.items():
            if key in self.values and self.values[key] not in allowed:
                self.refuse(f"{key} = {self.values[key]!r} is not supported, only {', '.join(map(repr, allowed))}")

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


def read_gpt2(config: Config, architecture: str) -> ModelShape:
    """GPT-2's config.json, with its own names for the sizes. Raises ConfigError."""
    own, activation = ("gelu_new", "gelu_pytorch_tanh"), config.values.get("activation_function", "gelu_new")
    more = () if activation in own else find("engine", "activations") or ()
    config.only({"activation_function": (*own, *more), "add_cross_attention": (False,)})
    context_key = "n_ctx" if "n_positions" not in config.values and "n_ctx" in config.values else "n_positions"
    intermediate_size = config.size("n_inner", 4 * config.size("n_embd"))
    shape = plain_shape(config, architecture, intermediate_size, "n_embd", "n_head", "n_layer", context_key)
    return replace(
        shape,
        layer_norm_epsilon=config.epsilon("layer_norm_epsilon", 1e-5),
        activation_function=activation,
        scale_attn_weights=config.flag("scale_attn_weights", True),
        scale_attn_by_inverse_layer_idx=config.flag("scale_attn_by_inverse_layer_idx", False),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def plain_shape(
    config: Config, architecture: str, intermediate_size: int, hidden_key: str, heads_key: str, layers_key: str,
    context_key: str,
) -> ModelShape:  # fmt: skip
    """A decoder whose heads split the hidden size evenly and share no keys."""
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


GPT2 = "GPT2LMHeadModel"


def readers() -> dict[str, str]:
    """Architecture -> the model_type that means the same."""
    return {GPT2: "gpt2"} | {name: part.model_type for name, part in keys("architecture").items()}


def read_shape(folder: str | os.PathLike[str], settings: object = None) -> ModelShape:
    """The shape in a folder's config.json, with the end-of-text ids of its generation_config.json added if there is one.

    Raises ConfigError that names the file and the key.
    """
    config = Config(Path(folder) / "config.json", settings)
    architecture = _architecture(config)
    eos, generation = config.eos(), config.path.with_name("generation_config.json")
    if generation.is_file():
        eos = tuple(dict.fromkeys((*eos, *Config(generation).eos())))
    shape = read_architecture(config, architecture)
    if shape.num_layers > MAX_LAYERS:
        config.refuse(f"{shape.num_layers} layers are more than {MAX_LAYERS}, the most that a model may have here")
    return replace(shape, torch_dtype=config.dtype(), eos_token_id=eos[0] if eos else None, more_eos_token_ids=eos[1:])


def read_architecture(config: Config, architecture: str) -> ModelShape:
    """The shape of a model of this architecture. Raises ConfigError."""
    if architecture == GPT2:
        return read_gpt2(config, architecture)
    shape: ModelShape = wanted("architecture", architecture, f"architecture {architecture}")(config, architecture)
    return shape


def _architecture(config: Config) -> str:
    model_type = config.values.get("model_type")
    known = readers()
    named = config.values.get("architectures") or [name for name, kind in known.items() if kind == model_type]
    architecture = str(named[0]) if isinstance(named, (list, tuple)) and named else "none"
    if architecture not in known and (ask_packages := find("engine", "general_plugins")):
        known = ask_packages()
    if architecture not in known:
        supported = ", ".join(known)
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
