"""The bytes of a picture as numbers (transformers: rescale and normalize of an image processor)."""

from __future__ import annotations

import torch
from torch import Tensor

from stage03_engine.multimodal.shape_fields import PixelValues
from stage03_engine.params.multimodal import MultiModalFeature


def normalised(picture: MultiModalFeature, values: PixelValues, weight: Tensor) -> Tensor:
    """[3, height, width], computed in float32; in the number format of `weight`, and where it lies."""
    flat = torch.frombuffer(bytearray(picture.data), dtype=torch.uint8)
    pixels = flat.view(picture.height, picture.width, 3).to(weight.device).float()
    normal = (pixels * values.scale - pixels.new_tensor(values.mean)) / pixels.new_tensor(values.std)
    return normal.permute(2, 0, 1).to(weight.dtype)
