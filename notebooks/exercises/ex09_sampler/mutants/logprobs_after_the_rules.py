"""Misconception: the log-probabilities are those of the distribution that was drawn from."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stage04_kernels.features.logits_processors import *  # noqa: F403
from stage04_kernels.features.logits_processors import apply_rules
from stage04_kernels.sampler import *  # noqa: F403
from stage04_kernels.sampler import SamplerOutput, SamplingMetadata, sample as reference

REJECTED = "Log-probabilities are those of the logits as they came in."


def sample(logits: Tensor, metadata: SamplingMetadata, backend: str = "torch") -> SamplerOutput:
    if metadata.rules is not None:
        logits = apply_rules(logits, metadata.rules)
    return reference(logits, replace(metadata, rules=None), backend)
