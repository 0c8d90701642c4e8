"""Attention in parts: each part of the keys leaves a softmax of its own, and parts are merged in any order.

The weights of a softmax, exp(score - largest) / total, seem to need all scores at once. They do not: keep the largest score, the
sum of exp(score - largest), and the values weighted by the same. Two of these merge into one, once both count from the same largest score.
One program that walks through the keys merges part after part (the online softmax: Milakov and Gimelshein 2018); several programs that share
a row's keys merge at the end (split-KV: Dao et al. 2023, Flash-Decoding; vLLM: merge_attn_states).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SoftmaxPart(NamedTuple):
    """What some of the keys leave of a softmax over all of them. A row that has seen no key has -inf, 0 and zeros."""

    largest: Tensor  # [..., rows, 1]: the largest score
    total: Tensor  # [..., rows, 1]: the sum of exp(score - largest)
    mixed: Tensor  # [..., rows, head_dim]: the values, weighted by exp(score - largest)


def attend_part(scores: Tensor, values: Tensor) -> SoftmaxPart:
    """The part of these keys: scores [..., rows, keys], -inf where a row does not see a key; values [..., keys, head_dim].
    There may be no keys at all."""
    nothing = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    largest = scores.amax(dim=-1, keepdim=True) if scores.shape[-1] else nothing
    weights = torch.exp(scores - _shift(largest))
    return SoftmaxPart(largest, weights.sum(dim=-1, keepdim=True), weights @ values)


# Invariant: the part whose largest score stays is multiplied by exp(0) = 1, and one that saw nothing adds 0: it changes no bit.
def merge_parts(one: SoftmaxPart, other: SoftmaxPart) -> SoftmaxPart:
    """The part of the keys of both."""
    largest = torch.maximum(one.largest, other.largest)
    shift = _shift(largest)
    one_factor, other_factor = torch.exp(one.largest - shift), torch.exp(other.largest - shift)
    total = one.total * one_factor + other.total * other_factor
    return SoftmaxPart(largest, total, one.mixed * one_factor + other.mixed * other_factor)


def finish(part: SoftmaxPart) -> Tensor:
    """The result of attention once all keys are in: [..., rows, head_dim]; zeros for a row that saw no key."""
    return torch.where(part.total == 0, 0.0, part.mixed / part.total)


def _shift(largest: Tensor) -> Tensor:
    """What to subtract from the scores: -inf - -inf would be NaN where a row has seen nothing."""
    return largest.masked_fill(largest == -torch.inf, 0.0)
