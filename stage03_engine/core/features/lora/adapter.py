"""Adapters: a low-rank pair beside a linear layer, y = W x + b + scale * B A x (Hu et al. 2021, "LoRA"; vllm/lora).

The folder is PEFT's: `adapter_config.json`, and `adapter_model.safetensors` with A [rank, in_features] and B [out_features, rank] of
each layer. A pair is thousands of times smaller than the matrix, so many adapters share one model, and a batch may hold requests of several.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stage03_engine.core.models.layers import Linear, check_finite
from stage03_engine.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?:transformer\.|model\.)?(.+)\.lora_([AB])\.weight")
MOST_ALPHA = 1_000_000
NOT_BUILT = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "bias")
"""What an adapter_config.json may ask for that is not built."""


@dataclass(frozen=True)
class Pair:
    """The adapter of one layer. a: [rank, in_features], b: [out_features, rank], with the scale multiplied in."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """An adapter: layer's name in our model -> its pair."""

    name: str
    rank: int
    pairs: dict[str, Pair]

    @property
    def num_bytes(self) -> int:
        """Of all its pairs."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


def read_adapter(
    name: str, folder: Path, layers: dict[str, Linear], max_rank: int, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Raises ConfigError, with the adapter's name, for one that is not whole, does not fit these layers, or asks for what is not built."""
    try:
        rank, scale = _rank_and_scale(_read_config(folder), max_rank)
        found = _read_tensors(folder)
        if not found:
            raise ConfigError(f"{WEIGHTS} holds no pairs")
        pairs = {}
        for layer, parts in found.items():
            if layer not in layers:
                raise ConfigError(f"the model has no linear layer {layer[:200]}")
            a, b = (
                _checked(f"lora_{part} of {layer}", parts.get(part), _size(layers[layer], part, rank)) for part in "AB"
            )
            pairs[layer] = Pair(a.to(device, dtype), (b.float() * scale).to(device, dtype))
            check_finite(f"scale times lora_B of {layer}, in {dtype},", pairs[layer].b)
    except ConfigError as error:
        raise ConfigError(f"adapter {name}: {error}") from error
    return Adapter(name, rank, pairs)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {folder / CONFIG}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{folder / CONFIG} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{CONFIG} describes no LoRA adapter: peft_type must be LORA")
    for key in NOT_BUILT:
        if config.get(key) and config[key] != "none":
            raise ConfigError(f"{key} {str(config[key])[:100]!r} is not built")
    return config


def _rank_and_scale(config: dict[str, Any], max_rank: int) -> tuple[int, float]:
    """The scale is alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, rsLoRA)."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"r must be an integer of at least 1, not {str(rank)[:100]!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < MOST_ALPHA:  # NaN fails too
        raise ConfigError(
            f"lora_alpha must be a number between -{MOST_ALPHA} and {MOST_ALPHA}, not {str(alpha)[:100]!r}"
        )
    if rank > max_rank:
        raise ConfigError(f"its rank {rank} is more than max_lora_rank {max_rank}")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _read_tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Layer -> "A" and "B" -> tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                if (match := TENSOR.fullmatch(name)) is None:
                    raise ConfigError(f"{WEIGHTS} has a tensor that belongs to no pair: {name[:200]}")
                found.setdefault(match[1], {})[match[2]] = checkpoint.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {folder / WEIGHTS}: {error}") from error
    return found


def _size(layer: Linear, part: str, rank: int) -> tuple[int, int]:
    return (rank, layer.in_features) if part == "A" else (layer.out_features, rank)


def _checked(what: str, tensor: Tensor | None, size: tuple[int, int]) -> Tensor:
    if tensor is None:
        raise ConfigError(f"{what} is missing")
    if tensor.shape != size:
        raise ConfigError(f"{what} has shape {list(tensor.shape)}, and the model needs {list(size)}")
    if not tensor.is_floating_point():
        raise ConfigError(f"{what} holds {tensor.dtype}")
    check_finite(what, tensor)
    return tensor
