"""What a quantized checkpoint takes in memory, from the heads of its files: for `serve --dry-run`. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SCALE_BYTES, ZERO_BYTES, INT32 = 4, 1, 4


def packed_bytes(tensors: Mapping[str, Sequence[int]], config: Mapping[str, Any], gpt2: bool, item_bytes: int) -> int:
    """What layers that stay packed add to the bytes of a model whose numbers all have `item_bytes`: less than zero. `tensors`: name -> shape.

    Those are the layers of four bits, but for GPT-2's in compressed-tensors, whose groups do not lie along its inputs. Groups after act-order
    are taken to be of one size.
    """
    method = config["quant_method"]
    compressed = method == "compressed-tensors"
    bits = (
        {group["weights"]["num_bits"] for group in config["config_groups"].values()}
        if compressed
        else {config.get("bits", 4)}
    )
    if method == "fp8" or bits != {4} or (gpt2 and compressed):
        return 0
    code, scale = ("weight_packed", "weight_scale") if compressed else ("qweight", "scales")
    less = 0
    for name, shape in tensors.items():
        layer, _, end = name.rpartition(".")
        if end == code and not layer.endswith("lm_head"):
            groups = tensors.get(f"{layer}.{scale}", (0, 0))
            order = shape[0] * 8 * INT32 if config.get("desc_act") and groups[0] > 1 else 0
            codes, scales = math.prod(shape) * INT32, math.prod(groups)
            less += codes + scales * (SCALE_BYTES + ZERO_BYTES) + order - 2 * codes * item_bytes
    return less
