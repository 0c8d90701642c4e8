"""What changes the logits before temperature: masks, biases and penalties (vLLM: v1/sample/ops, v1/sample/logits_processor).

Every function takes logits [num_rows, vocab] and returns new ones. Most rules touch few rows and few tokens, so they come as
pairs: `rows[i]` and `tokens[i]` name one logit. The slow twins are in lab/logits_reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Single logits: tokens[i] of row rows[i]. A pair may occur twice."""

    rows: Tensor  # [num_pairs] int64
    tokens: Tensor  # [num_pairs] int64


@dataclass(frozen=True)
class Penalties:
    """The penalties of the rows that have any; k = their number."""

    rows: Tensor  # [k] int64
    in_prompt: Tensor  # [k, vocab] bool: the prompt holds the token
    output_counts: Tensor  # [k, vocab] float32: how often the output holds it
    repetition: Tensor  # [k] float32; 1 = off
    frequency: Tensor  # [k] float32; 0 = off
    presence: Tensor  # [k] float32; 0 = off


@dataclass(frozen=True)
class LogitsRules:
    """The rules of one step; None = no row asks for this one."""

    allowed: Pairs | None = None
    forbidden: Pairs | None = None  # bad words at their last token, and what would end a row before its min_tokens
    bias: tuple[Pairs, Tensor] | None = None  # pairs, and what to add to each [num_pairs] float32
    penalties: Penalties | None = None

    def apply(self, logits: Tensor, penalties: bool) -> Tensor:
        """The logits after all rules; without `penalties`, all but those."""
        return apply_rules(logits, self if penalties else replace(self, penalties=None))


def apply_allowed(logits: Tensor, pairs: Pairs) -> Tensor:
    """Rows that occur in `pairs` keep the tokens named there and no others."""
    keep = torch.zeros_like(logits, dtype=torch.bool)
    keep[pairs.rows, pairs.tokens] = True
    concerned = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    concerned[pairs.rows] = True
    return logits.masked_fill(concerned[:, None] & ~keep, -torch.inf)


def apply_forbidden(logits: Tensor, pairs: Pairs) -> Tensor:
    """Forbid these tokens. A row that would have none left stays as it was: something must be drawn."""
    result = logits.clone()
    result[pairs.rows, pairs.tokens] = -torch.inf
    rows = pairs.rows.unique()
    dead = rows[(result[rows] == -torch.inf).all(dim=-1)]
    result[dead] = logits[dead]
    return result


def apply_bias(logits: Tensor, pairs: Pairs, bias: Tensor) -> Tensor:
    """Add bias[i] to the logit that pair i names."""
    return logits.index_put((pairs.rows, pairs.tokens), bias, accumulate=True)


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    """Make tokens that are already there less likely.

    Repetition (Keskar et al. 2019), over prompt and output: a positive logit is divided by it, a negative one multiplied.
    Frequency is subtracted as often as the output holds the token, presence once if it holds it at all.
    """
    some = logits[penalties.rows]  # [k, vocab]
    counts = penalties.output_counts
    seen = penalties.in_prompt | (counts > 0)
    repetition = penalties.repetition[:, None]
    some = torch.where(seen, torch.where(some > 0, some / repetition, some * repetition), some)
    some = some - penalties.frequency[:, None] * counts - penalties.presence[:, None] * (counts > 0)
    result = logits.clone()
    result[penalties.rows] = some
    return result


def apply_rules(logits: Tensor, rules: LogitsRules) -> Tensor:
    """All rules, in vLLM's order: allowed tokens, forbidden ones, bias, penalties."""
    if rules.allowed is not None:
        logits = apply_allowed(logits, rules.allowed)
    if rules.forbidden is not None:
        logits = apply_forbidden(logits, rules.forbidden)
    if rules.bias is not None:
        logits = apply_bias(logits, *rules.bias)
    if rules.penalties is not None:
        logits = apply_penalties(logits, rules.penalties)
    return logits


def forbidden_by_bad_words(bad_words: list[list[int]], output: list[int]) -> list[int]:
    """The tokens that would complete a bad word now: a word's last token, when the output ends with the tokens before it."""
    return [word[-1] for word in bad_words if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]]
