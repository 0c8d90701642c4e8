"""The checks of low-rank sums: the ways of a CPU against one row after another."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from stage04_kernels.backends.native import library
from stage04_kernels.features.lora import RowGroups, add_low_rank_reference, low_rank_kernel
from stage04_kernels.lab.check_row import NUM_SEEDS, Row
from stage04_kernels.lab.tolerances import TOLERANCES, Tolerance

PLACES_OF_ROWS = {
    "nobody": [-1] * 5,
    "all rows, one adapter": [2] * 33,
    "decodes, one adapter each": [3, 0, 2, 1],
    "mixed, any order": [1, -1, 0, 1, 1, 3, -1, 0, 1, 1, 0],
}


def check_low_rank(seed: int) -> Iterator[Row]:
    """Rows of several adapters and of none, for pairs of several ranks and sizes."""
    for backend in ("torch", "native"):
        if backend == "native" and (problem := library.problem()):
            print(f"add_low_rank[{backend}] is left out: {problem}", file=sys.stderr)
            continue
        for name, place_of in PLACES_OF_ROWS.items():
            for dtype, one in TOLERANCES.items():
                if backend == "native" and not low_rank_kernel(backend, dtype).recordable:
                    continue  # torch does it
                both = Tolerance(4 * one.atol, 4 * one.rtol)  # two products in a row, each rounded
                what = f"add_low_rank[{backend}]: {name}"
                row = Row(what, "one row at a time", both, str(dtype).removeprefix("torch."))
                for case_seed in range(seed, seed + NUM_SEEDS):
                    _compare(row, backend, place_of, dtype, torch.Generator().manual_seed(case_seed))
                yield row


def _compare(row: Row, backend: str, place_of: list[int], dtype: torch.dtype, generator: torch.Generator) -> None:
    groups, kernel = RowGroups.of(place_of), low_rank_kernel(backend, dtype)
    for rank, sizes in ((1, (5, 9)), (8, (64, 192)), (20, (300, 77))):
        y, x = (torch.randn(len(place_of), size, generator=generator).to(dtype) for size in reversed(sizes))
        a, b = kernel.places(4, rank, sizes, dtype, torch.device("cpu"))
        a.copy_(torch.randn(a.shape, generator=generator) / sizes[0] ** 0.5)
        b.copy_(torch.randn(b.shape, generator=generator) / rank**0.5)
        slow = add_low_rank_reference(y, x, a, b, groups)
        row.compare(kernel.add(y, x, a, b, groups), slow)
