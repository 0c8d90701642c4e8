"""Scales of the KV cache that a checkpoint brings: one for the keys and one for the values of a layer
(vLLM: BaseKVCacheMethod, and maybe_remap_kv_scale_name in vllm/model_executor/model_loader/weight_utils.py).

A format of 8 bits without scales of its own holds key / k_scale, so that the largest keys of a text for calibration fit, and are read times k_scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stage03_engine.errors import ConfigError
from stage04_kernels.features.kv_cache_8bit.formats import KVFormat

KEYS, VALUES = "keys", "values"
NAMES = {
    "k_scale": KEYS, "v_scale": VALUES, "kv_scale": KEYS, "k_proj.output_scale": KEYS, "v_proj.output_scale": VALUES,
}  # fmt: skip
"""Ends of names that tools give, in any part of a layer's attention -> what they scale. kv_scale is for both, as one alone is."""
OTHERS = ("q_scale", "prob_scale", "k_zero_point", "v_zero_point")
"""Of attention whose queries and weights have 8 bits too, which it has nowhere here."""
Scales = dict[int, dict[str, float]]
"""Layer -> keys or values -> what they are multiplied by when they are read."""


def side_of(name: str) -> str | None:
    """What a tensor scales; "" for a scale that nothing here needs, None if it is none of the cache."""
    end = name.rpartition(".")[2]
    if end in OTHERS:
        return ""
    return next((side for known, side in NAMES.items() if f".{name}".endswith(f".{known}")), None)


def without_scales(
    tensors: Iterator[tuple[str, Tensor]], found: Scales, kv_format: KVFormat, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors but for the scales of the cache, which go into `found`, unless the format has its own. Raises ConfigError for one that is none."""
    for name, tensor in tensors:
        if (side := side_of(name)) is None:
            yield name, tensor
        elif side and not kv_format.has_scales:
            of_layer = found.setdefault(_layer(name), {})
            if of_layer.setdefault(side, scale := _number(name, tensor, kv_format, dtype)) != scale:
                raise ConfigError(f"{name} is {scale:g}, and another tensor says {of_layer[side]:g}")


def _layer(name: str) -> int:
    """Its number in this worker's part of the model."""
    number = next((part for part in name.split(".") if part.isascii() and part.isdecimal()), None)
    if number is None or len(number) > 6:
        raise ConfigError(f"{name} is a scale of the KV cache, and names no layer")
    return int(number)


def _number(name: str, tensor: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> float:
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise ConfigError(
            f"{name} holds {tensor.dtype} of shape {list(tensor.shape)}, and must be one floating-point number: "
            "a KV cache of 8 bits has a scale for all keys of a layer, and one for its values"
        )
    scale = float(tensor.float().item())
    if not (math.isfinite(scale) and scale > 0 and scale * kv_format.largest <= torch.finfo(dtype).max):
        raise ConfigError(f"{name} is {scale:g}, with which {kv_format.name} has no numbers: the weights are broken")
    return scale
