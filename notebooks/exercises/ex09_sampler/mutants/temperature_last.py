"""Misconception: temperature belongs to the draw, so it comes after the filters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import *  # noqa: F403
from stage04_kernels.sampler import *  # noqa: F403
from stage04_kernels.sampler import SamplingMetadata, transform_rows as reference

REJECTED = "Temperature comes first"


def transform_rows(logits: Tensor, rows: Tensor, metadata: SamplingMetadata) -> Tensor:
    filtered = reference(logits, rows, replace(metadata, temperature=torch.ones_like(metadata.temperature)))
    return filtered / metadata.temperature[rows, None]
