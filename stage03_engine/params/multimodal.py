"""The pictures of a request: an EngineCoreRequest's `task`, and how many places for them its prompt must have (vllm/multimodal/inputs.py,
MultiModalFeatureSpec)."""

from __future__ import annotations

import hashlib

import msgspec


class Picture(msgspec.Struct, frozen=True, gc=False):
    """What the vision tower sees of a picture: a byte for each colour of each pixel."""

    identifier: str  # a sha256 of its size and pixels
    data: bytes  # [height, width, 3], resized and cropped
    width: int
    height: int
    file_width: int  # of the file that it was
    file_height: int

    @classmethod
    def of(cls, pixels: bytes, size: tuple[int, int], file_size: tuple[int, int]) -> Picture:
        """With the name that says what it shows. Sizes are (width, height): without its own, a black picture that lies would be the
        same as one that stands."""
        name = hashlib.sha256(f"{size[0]} {size[1]} ".encode() + pixels).hexdigest()
        return cls(name, pixels, *size, *file_size)


class MultiModalFeature(msgspec.Struct, array_like=True, gc=False):
    """One picture."""

    identifier: str  # of its pixels: the same picture has the same keys and values after the same beginning
    offset: int  # its first place in the prompt
    length: int  # its places
    data: bytes  # [height, width, 3], resized and cropped, a byte each
    width: int
    height: int


class MultiModalInputs(msgspec.Struct, array_like=True, weakref=True):
    """All of a request, in the order of their places."""

    features: list[MultiModalFeature]


class ImagePlaces:
    """Part of SamplingParams; set by the front end, not by callers."""

    __slots__ = ()
    image_places: tuple[int, ...] = ()  # how many each picture takes in the prompt
