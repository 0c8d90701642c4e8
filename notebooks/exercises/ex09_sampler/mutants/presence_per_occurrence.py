"""Misconception: presence and frequency are the same penalty under two names, each per occurrence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import Penalties, apply_penalties as reference
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "The presence penalty is subtracted once"


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    both = penalties.frequency + penalties.presence
    return reference(logits, replace(penalties, frequency=both, presence=torch.zeros_like(both)))
