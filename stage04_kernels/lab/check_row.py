"""One row of the table of `python -m stage04_kernels check`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stage04_kernels.lab.tolerances import EXACT, Tolerance

NUM_SEEDS = 4  # how many times each batch shape is filled with new numbers


@dataclass
class Row:
    """One row of the table."""

    what: str
    against: str
    tolerance: Tolerance = EXACT
    dtype: str = "float32"
    cases: int = 0
    max_error: float = 0.0
    ok: bool = True

    def compare(self, fast: Tensor, slow: Tensor) -> None:
        """Count one case. NaN anywhere, or -inf in only one of them, counts as an infinite error."""
        fast, slow = fast.double(), slow.double()
        error = torch.where(fast == slow, 0.0, (fast - slow).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        size = torch.where(slow.isfinite(), slow.abs(), 0.0)
        self.cases += 1
        self.max_error = max(self.max_error, float(error.max()))
        self.ok = self.ok and bool((error <= self.tolerance.atol + self.tolerance.rtol * size).all())
