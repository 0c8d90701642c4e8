"""Requests and answers that are about classes (vllm/entrypoints/pooling/classify/protocol.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from stage02_server.features.pooling.protocol import InputRequest
from stage02_server.protocol_response import UsageInfo
from stage03_engine.params.pooling_params import PoolingParams


class ClassificationRequest(InputRequest):
    """POST /classify."""

    def to_pooling_params(self) -> PoolingParams:
        """One number per class, as probabilities unless `use_activation` is false."""
        return PoolingParams(task="classify", normalize=self.use_activation)


class ClassificationData(BaseModel):
    """What one input is: the label of the largest of `probs`, which holds one number for each of `num_classes` classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(BaseModel):
    """The answer of /classify."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassificationData]
    usage: UsageInfo
