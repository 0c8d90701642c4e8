"""Several adapters in one batch: which rows use which, what is added to them, and who makes room for a newcomer.

A layer has `places`. A place holds one adapter's pair: a[place] is A, [rank, in_features], and b[place] is B, [out_features, rank], with the
scale multiplied in. An adapter with a smaller rank than the place has zeros in the rest. What a batch is told of its adapters are numbers
of places, one per row; NO_PLACE (-1) means the model alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch  # noqa: F401 - for you to use
from torch import Tensor

from stage04_kernels.features.lora import NO_PLACE, RowGroups  # noqa: F401 - NO_PLACE for you to use


def group_rows(place_of: np.ndarray) -> list[tuple[int, np.ndarray | None]]:
    """(place, the numbers of its rows [n] int64, in order) for each place that rows use, from the lowest up; (place, None) instead if all
    rows use this one: then nothing has to be picked out.

    place_of: [num_rows] int64, the place of each row; NO_PLACE for a row without an adapter. It may be empty.
    """
    raise NotImplementedError


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
    """y, with B A x of its own adapter added to each row that has one. y itself is changed, and returned.

    y  [num_rows, out_features]           what the layer's own matrix made of x
    x  [num_rows, in_features]
    a  [num_places, rank, in_features]    in the adapters' number format, which may be another one than y's
    b  [num_places, out_features, rank]

    groups.by_place is what your group_rows found, with the rows as tensors: a list of (place, rows [n] int64 or None).
    """
    raise NotImplementedError


def place_for(
    places: Mapping[int, int], num_places: int, in_batch: Collection[int], pinned: Collection[int]
) -> tuple[int, int | None]:
    """(the place that a newcomer gets, the adapter that has to leave it; None if it was free).

    places    adapter -> its place, below num_places; the one that was used longest ago comes first
    in_batch  the adapters of the requests in the batch; there is always a place that none of them has
    pinned    adapters that an operator wants to keep
    """
    raise NotImplementedError
