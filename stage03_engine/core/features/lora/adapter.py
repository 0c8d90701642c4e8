"""Adapters: a low-rank pair beside a linear layer, y = W x + b + scale * B A x (Hu et al. 2021, "LoRA"; vllm/lora).

The folder is PEFT's: `adapter_config.json`, and `adapter_model.safetensors` with A [rank, in_features] and B [out_features, rank] of
each layer. A pair is thousands of times smaller than the matrix, so many adapters share one model, and a batch may hold requests of several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from stage03_engine.core.features.lora.config_file import parse_config
from stage03_engine.core.features.lora.files import WEIGHTS, digest_of, read_files
from stage03_engine.core.features.lora.slices import Sliced, is_elsewhere
from stage03_engine.core.models.layers import check_finite
from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape

TENSOR = re.compile(r"base_model\.model\.(?:transformer\.|model\.)?(.+)\.lora_([AB])\.weight")


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
    name: str,
    folder: Path,
    layers: Mapping[str, Sliced],
    max_rank: int,
    dtype: torch.dtype,
    shape: ModelShape,
    digest: str,
) -> Adapter:
    """An adapter in CPU memory; of several workers each keeps its slices, of its own layers. Raises ConfigError, with the adapter's name, for one
    that is not whole, does not fit these layers, or asks for what is not built.

    shape: of this worker's part of the model
    digest: of the files as they were first found. Nothing of other files is looked at
    """
    config: dict[str, Any] = {}
    try:
        files = read_files(folder)
        if digest_of(files) != digest:
            raise ConfigError(f"the files in {folder} are no longer those that were loaded")
        config = parse_config(files[0])
        rank, scale = _rank_and_scale(config, max_rank)
        found = _read_tensors(files[1])
        _check_any(found)
        found = {layer: parts for layer, parts in found.items() if layer in layers or not is_elsewhere(layer, shape)}
        _check_whole(config, found, layers)
        pairs = {}
        for layer, parts in found.items():
            own = layers[layer]
            a, b = (_checked(f"lora_{part} of {layer}", parts.get(part), own.size(part, rank)) for part in "AB")
            pairs[layer] = pair = Pair(own.cut("A", a).to(dtype), (own.cut("B", b).float() * scale).to(dtype))
            check_finite(f"scale times lora_B of {layer}, in {dtype},", pair.b)
    except ConfigError as error:
        raise ConfigError(f"adapter {name}: {error}{_made_for(config, error)}") from error
    return Adapter(name, rank, pairs)


def _made_for(config: dict[str, Any], error: ConfigError) -> str:
    """Which model the adapter says it belongs to, if it does not fit this one."""
    base = config.get("base_model_name_or_path")
    fits = not any(said in str(error) for said in ("the model needs", "the model has no"))
    return "" if fits or not isinstance(base, str) or not base else f" (it says that it was made for {base[:100]!r})"


def _check_any(found: dict[str, dict[str, Tensor]]) -> None:
    if not found:
        raise ConfigError(f"{WEIGHTS} holds no pairs")


def _check_whole(config: dict[str, Any], found: dict[str, dict[str, Tensor]], layers: Mapping[str, Sliced]) -> None:
    """Raises ConfigError if it has a pair that belongs to no layer, or lacks some of those that `target_modules` names."""
    for layer in found:
        if layer not in layers:
            raise ConfigError(f"the model has no linear layer {layer[:200]}")
    targets = config.get("target_modules")
    chosen = any(config.get(key) is not None for key in ("layers_to_transform", "exclude_modules"))
    if isinstance(targets, list) and not chosen:  # else it is a pattern, or a choice among them
        for layer in layers.keys() - found.keys():
            if any(isinstance(target, str) and f".{layer}".endswith(f".{target}") for target in targets):
                raise ConfigError(f"lora_A and lora_B of {layer} are missing")


def _rank_and_scale(config: dict[str, Any], max_rank: int) -> tuple[int, float]:
    """The scale is alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, rsLoRA)."""
    rank, alpha = config["r"], config["lora_alpha"]
    if rank > max_rank:
        raise ConfigError(f"its rank {str(rank)[:100]} is more than max_lora_rank {max_rank}")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _read_tensors(content: bytes) -> dict[str, dict[str, Tensor]]:
    """Layer -> "A" and "B" -> tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # KeyError: a number format that torch lacks
        raise ConfigError(f"cannot read {WEIGHTS}: {error}") from error
    for name, tensor in tensors.items():
        if (match := TENSOR.fullmatch(name)) is None:
            raise ConfigError(f"{WEIGHTS} has a tensor that belongs to no pair: {name[:200]}")
        found.setdefault(match[1], {})[match[2]] = tensor
    return found


def _checked(what: str, tensor: Tensor | None, size: tuple[int, int]) -> Tensor:
    if tensor is None:
        raise ConfigError(f"{what} is missing")
    if tensor.shape != size:
        raise ConfigError(f"{what} has shape {list(tensor.shape)}, and the model needs {list(size)}")
    if not tensor.is_floating_point():
        raise ConfigError(f"{what} holds {tensor.dtype}")
    check_finite(what, tensor)
    return tensor
