"""Misconception: a penalty divides; but a negative logit that is divided becomes likelier."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import Penalties
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "divides a positive logit and multiplies a negative one"


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    some, counts = logits[penalties.rows], penalties.output_counts
    some = torch.where(penalties.in_prompt | (counts > 0), some / penalties.repetition[:, None], some)
    some = some - penalties.frequency[:, None] * counts - penalties.presence[:, None] * (counts > 0)
    result = logits.clone()
    result[penalties.rows] = some
    return result
