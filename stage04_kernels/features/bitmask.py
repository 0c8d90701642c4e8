"""Token masks of grammars (vLLM: apply_grammar_bitmask in v1/structured_output/utils.py)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> Tensor:
    """Logits [num_rows, vocab] in which rows[i] keeps the tokens whose bit in bitmask[i] is 1; the others become -inf.

    bitmask [num_masked, ceil(vocab / 32)] int32, lowest bit first; rows [num_masked] int64, each at most once. All other
    rows stay unchanged, bit for bit.
    """
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask[:, :, None] >> bits) & 1  # [num_masked, words, 32]
    forbidden = allowed.flatten(1)[:, : logits.shape[-1]] == 0
    result = logits.clone()
    result[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
    return result
