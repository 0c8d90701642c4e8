"""Misconception: only what the model itself wrote counts as a repetition."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import Penalties, apply_penalties as reference
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "concerns every token of the prompt or of the output"


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    return reference(logits, replace(penalties, in_prompt=torch.zeros_like(penalties.in_prompt)))
