"""Tile configurations: the same kernel sources, cut wide for the interpreter and narrow for a GPU.

The interpreter pays per operation, whatever its size, so it wants few large tiles. A GPU holds a tile in registers and shared
memory, so its tiles are small and many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
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
class Tile:
    """What one program of attention takes at a time."""

    rows: int  # BLOCK_M: query tokens, with all heads that share a key/value head
    keys: int  # BLOCK_N: keys per iteration of the loop
    num_warps: int


DECODE_ROWS = 16
"""A matrix unit takes at least 16 rows; a decode fills one of them for each head of its group."""
_NARROW = {  # (bytes per number, head size) -> tiles of decodes, and of prompts
    (2, 64): (Tile(DECODE_ROWS, 64, 4), Tile(64, 64, 4)),
    (2, 128): (Tile(DECODE_ROWS, 64, 4), Tile(128, 64, 8)),
    (2, 256): (Tile(DECODE_ROWS, 32, 4), Tile(32, 32, 4)),
    (4, 64): (Tile(DECODE_ROWS, 32, 8), Tile(32, 32, 8)),
    (4, 128): (Tile(DECODE_ROWS, 32, 8), Tile(32, 32, 8)),
    (4, 256): (Tile(DECODE_ROWS, 16, 8), Tile(32, 16, 8)),
}
"""The largest tiles that need no more registers than a thread has (`python -m stage04_kernels compile`), under two rules. A warp of a prompt
computes 16 rows at a time, so 64 rows keep four warps busy, and eight would compute them twice. And no matrix unit multiplies
exact float32: its products stand in registers, so its tiles are small."""


def wide_tile(rows: int, padded_dim: int, itemsize: int, has_window: bool) -> Tile:
    """As many rows as there are, up to 256."""
    return Tile(next_power_of_2(min(rows, 256)), 512 if padded_dim <= 128 else 256, 4)


def narrow_tile(rows: int, padded_dim: int, itemsize: int, has_window: bool) -> Tile:
    """One size for decodes and one for prompts: each size is compiled by itself."""
    is_prompt, head_size = rows > DECODE_ROWS, max(64, min(padded_dim, 256))
    tile = _NARROW[itemsize, head_size][is_prompt]
    # A window's second comparison takes registers that the largest tile does not leave.
    return replace(tile, keys=tile.keys // 2) if has_window and tile.rows == 128 else tile


@dataclass(frozen=True)
class AttentionTiles:
    """How attention is cut. `upcast`: multiply in float32, because the interpreter's bfloat16 arithmetic is wrong."""

    name: str
    choose: Callable[[int, int, int, bool], Tile]
    min_split: int  # a split of fewer keys is not worth its program
    upcast: bool
    num_stages: int

    def tile(self, group: int, max_query_len: int, padded_dim: int, itemsize: int, has_window: bool) -> Tile:
        """The tile for a batch whose longest query has `max_query_len` tokens.

        group       query heads per key/value head; one token with all of them always fits
        padded_dim  head size as a power of two
        itemsize    bytes per number of the query, 2 or 4
        """
        tile = self.choose(max_query_len * group, padded_dim, itemsize, has_window)
        return replace(tile, rows=max(tile.rows, next_power_of_2(group)))


WIDE = AttentionTiles("wide", wide_tile, 64, True, 1)
NARROW = AttentionTiles("narrow", narrow_tile, 256, False, 3)
ATTENTION_TILES = {tiles.name: tiles for tiles in (WIDE, NARROW)}
DEFAULT_TILES = WIDE if INTERPRETED else NARROW
