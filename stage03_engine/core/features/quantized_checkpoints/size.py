"""What a quantized checkpoint takes in memory, from the heads of its files: for `serve --dry-run`. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SCALE_BYTES, ZERO_BYTES, INT32 = 4, 1, 4


def packed_bytes(tensors: Mapping[str, Sequence[int]], config: Mapping[str, Any], gpt2: bool, item_bytes: int) -> int:
    """What layers that stay packed add to the bytes of a model whose numbers all have `item_bytes`: less than zero. `tensors`: name -> shape.

    Those are the layers of four bits, and of eight with one scale for each output and no zeros; but for GPT-2's in compressed-tensors, whose
    groups do not lie along its inputs. Groups after act-order are taken to be of one size.
    """
    compressed = config["quant_method"] == "compressed-tensors"
    if config["quant_method"] == "fp8" or (gpt2 and compressed):
        return 0
    groups = [group["weights"] for group in config["config_groups"].values()] if compressed else [config]
    bits = {group["num_bits"] if compressed else group.get("bits", 4) for group in groups}
    if bits == {4}:
        return _of_4_bits(tensors, compressed, bool(config.get("desc_act")), item_bytes)
    whole = all(each.get("symmetric", each.get("sym", True)) and each.get("type", "int") == "int" for each in groups)
    return _of_8_bits(tensors, compressed, item_bytes) if bits == {8} and whole else 0


def _of_4_bits(tensors: Mapping[str, Sequence[int]], compressed: bool, by_order: bool, item_bytes: int) -> int:
    code, scale = ("weight_packed", "weight_scale") if compressed else ("qweight", "scales")
    less = 0
    for layer, shape in _layers(tensors, code):
        groups = tensors.get(f"{layer}.{scale}", (0, 0))
        order = shape[0] * 8 * INT32 if by_order and groups[0] > 1 else 0
        codes, scales = math.prod(shape) * INT32, math.prod(groups)
        less += codes + scales * (SCALE_BYTES + ZERO_BYTES) + order - 2 * codes * item_bytes
    return less


def _of_8_bits(tensors: Mapping[str, Sequence[int]], compressed: bool, item_bytes: int) -> int:
    scale, less = "weight_scale" if compressed else "scales", 0
    for code, each in (("qweight", INT32), ("weight_packed", INT32), ("weight", 1)):
        for layer, shape in _layers(tensors, code):
            scales = tensors.get(f"{layer}.{scale}")  # [groups, outputs], or [outputs, groups], [outputs] or one
            if scales is None or (tuple(scales[1:]) not in ((), (1,)) if compressed else scales[0] != 1):
                continue  # stored plainly, or in groups
            codes = math.prod(shape) * each
            less += codes * (1 - item_bytes) + shape[0 if compressed else 1] * SCALE_BYTES
    return less


def _layers(tensors: Mapping[str, Sequence[int]], code: str) -> list[tuple[str, Sequence[int]]]:
    """(layer, shape) of all tensors with this last name, but for the output matrix, which is never packed."""
    split = [(*name.rpartition("."), shape) for name, shape in tensors.items()]
    return [(layer, shape) for layer, _, end, shape in split if end == code and not layer.endswith("lm_head")]
