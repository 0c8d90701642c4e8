"""The number formats of 8 bits that a KV cache may have (vLLM: CacheDType in config/cache.py, KVQuantMode). Imports no torch.

A number of 8 bits is a *code*. With a scale, a head's key (or value) of one token is codes times one float32: its largest number decides the
scale, and nothing else does. So what is stored for a token depends on that token alone, not on its neighbours in the block or on the
order in which they came: a request gets the same tokens alone, in any batch, in chunks, from the prefix cache and after a preemption.
A scale for each block would have to change when a larger number is written beside what is there already.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 4
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. Rounding makes smaller ones too coarse to divide by: such a head is stored as zeros."""


@dataclass(frozen=True)
class KVFormat:
    """`dtype` is torch's name of the codes, `largest` the largest of them."""

    name: str
    dtype: str
    largest: float
    has_scales: bool

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one head's key, or value, of one token."""
        return head_dim + SCALE_BYTES * self.has_scales

    def head_dim(self, head_bytes: int) -> int:
        """The other way round."""
        return head_bytes - SCALE_BYTES * self.has_scales


FORMATS = {
    each.name: each
    for each in (
        KVFormat("fp8_e4m3", "float8_e4m3fn", 448.0, False),
        KVFormat("fp8_e5m2", "float8_e5m2", 57344.0, False),
        KVFormat("int8_per_token_head", "int8", 127.0, True),
        KVFormat("fp8_per_token_head", "float8_e4m3fn", 448.0, True),
    )
}
"""vLLM's name -> format. Without scales a code is the number itself, and what is too large becomes the largest."""
SHORT = {"fp8": "fp8_e4m3", "int8": "int8_per_token_head"}
