"""The draw, compiled: noise and race in one pass over a row, and no noise for tokens that cannot win. The transforms before it
are torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stage04_kernels.attention import load
from stage04_kernels.backends.native.library import function
from stage04_kernels.sampler import SamplerKernels, SamplingMetadata, gather_logprobs, transform_rows

if TYPE_CHECKING:
    from stage04_kernels.features.logits_processors import Penalties

DRAW = function("draw", "pppplli")


def draw(logits: Tensor, metadata: SamplingMetadata, penalties: Penalties | None) -> Tensor:
    """Penalties, transforms and draws of all rows: float32 logits [num_rows, vocab] on a CPU -> [num_rows] int64."""
    if penalties is not None:
        logits = load("stage04_kernels.features.logits_processors:apply_penalties")(logits, penalties)
    token_ids = logits.argmax(dim=-1)
    if metadata.random_rows:
        rows = torch.tensor(metadata.random_rows)
        token_ids[rows] = race(
            transform_rows(logits[rows], rows, metadata), *(key[rows] for key in metadata.noise_keys)
        )
    return token_ids


def race(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As `sample_random`: one token per row of float32 logits [num_rows, vocab]; seeds and positions [num_rows] int64."""
    logits, tokens = logits.contiguous(), torch.empty_like(seeds)
    DRAW(
        logits.data_ptr(), seeds.contiguous().data_ptr(), positions.contiguous().data_ptr(), tokens.data_ptr(),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
    return tokens


SAMPLER_KERNELS = SamplerKernels(draw, gather_logprobs)
