"""What the shape of a model that sees holds besides: its vision tower, and how a picture becomes the tower's input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageProcessorConfig:
    """The settings of transformers' CLIPImageProcessor. A picture is resized, cropped, rescaled and normalised, in this order."""

    resize: tuple[int, int] | int | None  # (height, width), or the length of the shorter side; None: left as it is
    resample: int  # PIL.Image.Resampling
    crop: tuple[int, int] | None  # height, width, out of the middle
    scale: float  # what the bytes 0 to 255 are multiplied by
    mean: tuple[float, ...]  # of the channels red, green, blue
    std: tuple[float, ...]


@dataclass(frozen=True)
class VisionShape:
    """A CLIP vision tower and the projector behind it."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int  # pixels of a side
    patch_size: int
    layer_norm_eps: float
    hidden_act: str
    num_used_layers: int  # the output of this layer is what the projector gets
    keeps_class_token: bool  # "full"; "default" drops it
    projector_act: str
    projector_bias: bool
    image_token: int  # id of the token that stands for a picture in a prompt
    processor: ImageProcessorConfig

    @property
    def num_patches(self) -> int:
        """Squares that a picture is cut into."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_image_tokens(self) -> int:
        """Places that a picture takes in a prompt: one for each vector that comes out of the projector."""
        return self.num_patches + self.keeps_class_token

    @property
    def image_bytes(self) -> int:
        """Of a picture on its way to the engine: [image_size, image_size, 3], a byte each."""
        return self.image_size**2 * 3


@dataclass(frozen=True, kw_only=True)
class MultiModalShape:
    """Of models that see."""

    vision: VisionShape | None = None
