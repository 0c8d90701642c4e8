"""The pictures of a request: an EngineCoreRequest's `task`, and how many places for them its prompt must have (vllm/multimodal/inputs.py,
MultiModalFeatureSpec)."""

from __future__ import annotations

import hashlib

import msgspec


class Picture(msgspec.Struct, frozen=True, gc=False):
    """What the vision tower sees of a picture: a byte for each colour of each pixel."""

    identifier: str  # a sha256 of its pixels
    data: bytes  # [image_size, image_size, 3]
    width: int  # of the file that it was
    height: int

    @classmethod
    def of(cls, pixels: bytes, width: int, height: int) -> Picture:
        """With the name that says what it shows."""
        return cls(hashlib.sha256(pixels).hexdigest(), pixels, width, height)


class MultiModalFeature(msgspec.Struct, array_like=True, gc=False):
    """One picture."""

    identifier: str  # of its pixels: the same picture has the same keys and values after the same beginning
    offset: int  # its first place in the prompt
    length: int  # its places
    data: bytes  # [image_size, image_size, 3], resized and cropped, a byte each


class MultiModalInputs(msgspec.Struct, array_like=True, weakref=True):
    """All of a request, in the order of their places."""

    features: list[MultiModalFeature]


class ImageCount:
    """Part of SamplingParams; set by the front end, not by callers."""

    __slots__ = ()
    num_images: int = 0
