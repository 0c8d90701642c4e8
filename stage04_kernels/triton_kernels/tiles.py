"""Tile configurations: the same kernel sources, cut wide for the interpreter and narrow for a GPU.

The interpreter pays per operation, whatever its size, so it wants few large tiles. A GPU holds a tile in registers and shared
memory, so its tiles are small and many.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Do the kernels of this package run under the interpreter? Triton reads the same variable when it decorates them."""


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@cache
def num_programs(device: torch.device) -> int:
    """How many programs a device runs at the same time, roughly: two per multiprocessor."""
    if device.type != "cuda":
        return 1
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class AttentionTiles:
    """How attention is cut. `upcast`: multiply in float32, because the interpreter's bfloat16 arithmetic is wrong."""

    name: str
    max_rows: int  # rows of a tile, when there are enough query tokens to fill them
    min_rows: int  # a matrix unit takes at least 16
    max_keys: int  # keys per iteration of the loop, for heads of up to 128
    min_split: int  # a split of fewer keys is not worth its program
    upcast: bool
    num_stages: int

    def rows(self, group: int, max_query_len: int) -> int:
        """BLOCK_M: room for the longest query if that is few rows, a power of two, at least one token with all its heads."""
        wanted = next_power_of_2(min(max_query_len * group, self.max_rows))
        return max(self.min_rows, wanted, next_power_of_2(group))

    def keys(self, padded_dim: int) -> int:
        """BLOCK_N: half as many where a head is larger than 128."""
        return self.max_keys if padded_dim <= 128 else self.max_keys // 2

    def warps(self, block_m: int, padded_dim: int) -> int:
        """A row of a large tile of large heads takes more registers than four warps have."""
        return 8 if block_m >= 64 and padded_dim >= 128 else 4


WIDE = AttentionTiles("wide", 256, 1, 512, 64, True, 1)
NARROW = AttentionTiles("narrow", 64, 16, 64, 256, False, 3)
ATTENTION_TILES = {tiles.name: tiles for tiles in (WIDE, NARROW)}
DEFAULT_TILES = WIDE if INTERPRETED else NARROW
