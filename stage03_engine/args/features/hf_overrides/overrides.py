"""`--hf-overrides` (vllm/config/model.py, `hf_overrides`; vllm/transformers_utils/config.py, `get_config`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape

GPT2_NAMES = {
    "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
"""The common names of sizes, which transformers takes for GPT-2's own."""
SIZES = {
    "num_hidden_layers": "num_layers", "n_layer": "num_layers", "hidden_size": "hidden_size", "n_embd": "hidden_size",
    "num_attention_heads": "num_heads", "n_head": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
    "intermediate_size": "intermediate_size", "n_inner": "intermediate_size", "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings", "n_positions": "max_position_embeddings",
}  # fmt: skip
"""Key of config.json -> field of ModelShape, for a known shape, which has no file."""


def overridden(values: dict[str, Any], settings: Any) -> dict[str, Any]:
    """The values of config.json with those of the setting in their place, each as a whole."""
    given = settings.hf_overrides
    if "n_layer" in values or values.get("model_type") == "gpt2":
        given = {GPT2_NAMES.get(key, key): value for key, value in given.items()}
    return values | given


def changed_shape(shape: ModelShape, settings: Any) -> ModelShape:
    """A known shape with other sizes. What follows from a size in config.json follows here too, unless it is given: the size of a head, and of
    an MLP four times as wide as the model. Raises ConfigError for what is no size of a shape."""
    sizes = _sizes(settings.hf_overrides)
    hidden_size, num_heads = sizes.get("hidden_size", shape.hidden_size), sizes.get("num_heads", shape.num_heads)
    if shape.num_kv_heads == shape.num_heads:
        sizes.setdefault("num_kv_heads", num_heads)
    if shape.intermediate_size == 4 * shape.hidden_size:
        sizes.setdefault("intermediate_size", 4 * hidden_size)
    if "head_dim" not in sizes and shape.head_dim * shape.num_heads == shape.hidden_size:
        if hidden_size % num_heads:
            raise ConfigError(f"hf_overrides: {num_heads} heads do not split a hidden size of {hidden_size} evenly")
        sizes["head_dim"] = hidden_size // num_heads
    changed = replace(shape, **sizes)  # type: ignore[arg-type]
    if num_heads % changed.num_kv_heads:
        raise ConfigError(f"hf_overrides: {num_heads} heads do not share {changed.num_kv_heads} evenly")
    if (windows := getattr(shape, "sliding_layers", ())) and len(windows) == shape.num_layers:
        changed = replace(changed, sliding_layers=tuple(range(changed.num_layers)))  # type: ignore[call-arg]
    return changed


def _sizes(given: dict[str, Any]) -> dict[str, int]:
    """Field of ModelShape -> its value."""
    sizes = {}
    for key, value in given.items():
        if key not in SIZES:
            raise ConfigError(
                f"hf_overrides: {key[:100]!r} is no size of a known shape; for other keys name a folder with a config.json"
            )
        if type(value) is not int or not 1 <= value < 2**31:
            raise ConfigError(f"hf_overrides: {key} must be a positive integer, not {repr(value)[:100]}")
        sizes[SIZES[key]] = value
    return sizes
