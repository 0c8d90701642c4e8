"""Low-rank sums of several adapters, compiled: one call for all rows of a layer, whichever adapters they have (vLLM: lora_shrink and lora_expand, which
its CPU backend writes in plain torch). The twin of `add_low_rank` in stage04_kernels/features/lora.py; native.cpp says how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stage04_kernels.backends.native.library import function

if TYPE_CHECKING:
    from stage04_kernels.features.lora import RowGroups

PAIRS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
ROWS = {torch.float32: "", torch.bfloat16: "_bf16"}
FUNCTIONS = {
    (rows, pairs): function(f"low_rank_{name}{suffix}", "ppppplllli")
    for pairs, name in PAIRS.items()
    for rows, suffix in ROWS.items()
}
"""By the number formats of rows and of pairs."""


def add_low_rank_native(y: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
    """`add_low_rank`, with the same arguments, all of them float32 or bfloat16 on a CPU; b is best a [num_places, rank, out_features], transposed.

    Sums are float32 from the first to the last. A row's result does not depend, in any bit, on the other rows.
    """
    if not y.is_contiguous():
        return y.copy_(add_low_rank_native(y.contiguous(), x, a, b, groups))
    num_rows, rank, x, a = y.shape[0], a.shape[1], x.contiguous(), a.contiguous()
    outputs_last = b.transpose(1, 2).contiguous()
    assert num_rows <= len(groups.place_of)
    FUNCTIONS[y.dtype, a.dtype](
        y.data_ptr(), x.data_ptr(), a.data_ptr(), outputs_last.data_ptr(), groups.address, num_rows, x.shape[1], y.shape[1],
        rank, torch.get_num_threads(),
    )  # fmt: skip
    return y
