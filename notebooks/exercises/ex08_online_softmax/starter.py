"""Attention in parts: each part of the keys leaves a softmax of its own, and parts are merged in any order.

SoftmaxPart is given: what some of the keys leave of a softmax over all of them. Its three fields, for scores [..., rows, keys]
and values [..., keys, head_dim], all float32:

largest  [..., rows, 1]         the largest score of the row; -inf if it has seen no key
total    [..., rows, 1]         the sum of exp(score - largest) over the keys that it has seen; 0 if there were none
mixed    [..., rows, head_dim]  the sum of exp(score - largest) * value over the same keys; zeros if there were none

SoftmaxPart(largest, total, mixed) makes one. In front of rows there may be any number of dimensions (a batch, heads, ...).
"""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.backends.online_softmax import SoftmaxPart


def attend_part(scores: Tensor, values: Tensor) -> SoftmaxPart:
    """The part that these keys leave.

    scores  [..., rows, keys]; -inf where a row does not see a key, in some places, in whole rows, or everywhere
    values  [..., keys, head_dim]; finite

    There may be no keys at all: scores [..., rows, 0]. (`amax` refuses such a tensor.)
    """
    raise NotImplementedError


def merge_parts(one: SoftmaxPart, other: SoftmaxPart) -> SoftmaxPart:
    """The part of the keys of both, from the two parts alone: the keys, scores and values are gone.

    Either of them, or both, may have seen nothing, in some rows or in all.
    """
    raise NotImplementedError


def finish(part: SoftmaxPart) -> Tensor:
    """The result of attention once all keys are in, [..., rows, head_dim]: softmax(scores) @ values; zeros for a row that has
    seen no key."""
    raise NotImplementedError
