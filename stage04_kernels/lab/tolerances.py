"""How far a fast path may be from its slow twin: one table, by number format.

An element passes when |fast - slow| <= atol + rtol * |slow|, as in torch.testing.assert_close. The slow twins compute in
float32 or better and round once, so the table holds the rounding of the fast path alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Absolute and relative part."""

    atol: float
    rtol: float

    def __str__(self) -> str:
        return f"{self.atol:g} + {self.rtol:g}|x|" if self.rtol else f"{self.atol:g}"


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
    torch.float16: Tolerance(1e-3, 1e-3),
}
EXACT = Tolerance(0.0, 0.0)  # for what only moves or picks numbers
