"""Low-rank sums of several adapters in one batch (Hu et al. 2021, "LoRA"; Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA";
vllm/lora/ops, lora_shrink and lora_expand).

Each row x of a batch may belong to another adapter: y += B[place] (A[place] x). The pairs of all adapters stand stacked in places, so
a batch names an adapter by a number. A place is as wide as the highest rank; what a smaller one does not fill is zero, and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from stage04_kernels.attention import load

NO_PLACE = -1
TILE_ROWS = 16  # of one tile of `RowGroups.tiles`: as many as a matrix unit takes at least

AddLowRank = Callable[[Tensor, Tensor, Tensor, Tensor, "RowGroups"], Tensor]


def group_rows(place_of: np.ndarray) -> list[tuple[int, np.ndarray | None]]:
    """Each place that rows use, from the lowest up, with the numbers of its rows in order [n] int64; None if all rows use it.

    place_of: [num_rows] int64; NO_PLACE for a row without an adapter.
    """
    places = np.unique(place_of[place_of != NO_PLACE]).tolist()
    if len(places) == 1 and (place_of == places[0]).all():
        return [(places[0], None)]
    return [(place, np.flatnonzero(place_of == place)) for place in places]


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Which rows of a batch use which place. One object serves all layers of a step."""

    place_of: np.ndarray  # [num_rows] int64: the place of each row; NO_PLACE: none
    device: torch.device

    @classmethod
    def of(cls, place_of: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> RowGroups:
        """The place of each row in turn."""
        return cls(np.asarray(place_of, dtype=np.int64), torch.device(device))

    @cached_property
    def _groups(self) -> list[tuple[int, np.ndarray | None]]:
        return group_rows(self.place_of)

    @cached_property
    def places(self) -> list[int]:
        """Those that rows use, in order."""
        return [place for place, _ in self._groups]

    @cached_property
    def by_place(self) -> list[tuple[int, Tensor | None]]:
        """(place, its rows in order [n] int64), and (place, None) if all rows use it."""
        return [
            (place, None if rows is None else torch.from_numpy(rows).to(self.device)) for place, rows in self._groups
        ]

    @cached_property
    def stacked(self) -> tuple[Tensor, Tensor] | None:
        """If several places have equally many rows, as in a step of decodes: the places [n] int64, and their rows [n, m] int64."""
        rows_of = [rows for _, rows in self._groups if rows is not None]
        if len(rows_of) < 2 or len(set(map(len, rows_of))) > 1:
            return None
        return torch.tensor(self.places).to(self.device), torch.from_numpy(np.stack(rows_of)).to(self.device)

    @cached_property
    def address(self) -> int:
        """Where `place_of` lies in memory. What reads it there sees what it holds by then."""
        return self.place_of.ctypes.data

    @cached_property
    def tiles(self) -> tuple[Tensor, Tensor]:
        """The same for a kernel whose programs take TILE_ROWS rows of one place each: the place of each tile [num_tiles] int32, and
        its rows [num_tiles, TILE_ROWS] int32, -1 where it has fewer."""
        places, tiles = list[int](), list[np.ndarray]()
        for place, own in self._groups:
            rows = np.arange(len(self.place_of)) if own is None else own
            for start in range(0, len(rows), TILE_ROWS):
                tile = np.full(TILE_ROWS, -1, dtype=np.int32)
                part = rows[start : start + TILE_ROWS]
                tile[: len(part)] = part
                places.append(place)
                tiles.append(tile)
        rows_of = np.stack(tiles) if tiles else np.empty((0, TILE_ROWS), dtype=np.int32)
        place_of = torch.tensor(places, dtype=torch.int32)
        return place_of.to(self.device), torch.from_numpy(rows_of).to(self.device)


def add_low_rank_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
    """The twin: one row after another, in float32. Shapes as in `add_low_rank`; y is not changed."""
    out = y.float().clone()
    for row, place in enumerate(groups.place_of.tolist()):
        if place != NO_PLACE:
            out[row] += b[place].float() @ (a[place].float() @ x[row].float())
    return out.to(y.dtype)


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
    """y with the low-rank sums added, in place: two small products for each place that rows use, or two batched ones for all of them.

    y: [num_rows, out_features]; x: [num_rows, in_features]; a: [num_places, rank, in_features]; b: [num_places, out_features, rank].
    The products are computed in the pairs' number format.
    """
    if groups.stacked is not None:
        places, rows_of = groups.stacked
        hidden = torch.bmm(x[rows_of].to(a.dtype), a[places].transpose(1, 2))  # [n, m, rank]
        more = torch.bmm(hidden, b[places].transpose(1, 2)).to(y.dtype)
        return y.index_add_(0, rows_of.flatten(), more.flatten(0, 1))
    for place, rows in groups.by_place:
        own = (x if rows is None else x[rows]).to(a.dtype)
        more = ((own @ a[place].T) @ b[place].T).to(y.dtype)
        y = y.add_(more) if rows is None else y.index_add_(0, rows, more)
    return y


@dataclass(frozen=True)
class LowRankKernel:
    """A way to add low-rank sums."""

    add: AddLowRank
    outputs_last: bool = False  # B is read as [num_places, rank, out_features]
    recordable: bool = False  # a recorded call may be replayed for other rows: it reads `RowGroups.place_of` again

    def places(
        self, num_places: int, rank: int, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Empty places for pairs, laid out as `add` reads them: a [num_places, rank, in_features], b [num_places, out_features, rank].

        sizes: (in_features, out_features)
        """
        a, b = (torch.zeros(num_places, rank, size, dtype=dtype, device=device) for size in sizes)
        return a, b.transpose(1, 2) if self.outputs_last else b.transpose(1, 2).contiguous()


def low_rank_kernel(backend: str, *formats: torch.dtype) -> LowRankKernel:
    """That of an attention backend, for rows and pairs of these number formats: with Triton go Triton's own, with native those of native.cpp if
    they know the formats, with all others torch's."""
    if backend.startswith("triton"):
        if backend == "triton-interpret":
            import stage04_kernels.triton_kernels.interpreted  # noqa: F401 - before Triton itself
        from stage04_kernels.triton_kernels.lora import add_low_rank_triton

        return LowRankKernel(add_low_rank_triton)
    if backend == "native" and load("stage04_kernels.backends.native.library:problem")() is None:
        from stage04_kernels.backends.native.lora import PAIRS, add_low_rank_native

        if all(each in PAIRS for each in formats):
            return LowRankKernel(add_low_rank_native, outputs_last=True, recordable=True)
    return LowRankKernel(add_low_rank)
