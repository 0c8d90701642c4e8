"""What the shape of a model that sees holds as well: its vision tower, and how a picture becomes the tower's input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PixelValues:
    """How the bytes of a picture become numbers, which the encoder does."""

    scale: float  # what the bytes 0 to 255 are multiplied by
    mean: tuple[float, ...]  # of the channels red, green, blue
    std: tuple[float, ...]


@dataclass(frozen=True)
class ImageProcessorConfig:
    """The settings of transformers' CLIPImageProcessor. A picture is resized, cropped, rescaled and normalised, in this order."""

    resize: tuple[int, int] | int | None  # (height, width), or the length of the shorter side; None: left as it is
    resample: int  # PIL.Image.Resampling
    crop: tuple[int, int] | None  # height, width, out of the middle
    values: PixelValues


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
    processor: ImageProcessorConfig

    @property
    def num_patches(self) -> int:
        """Squares that a picture is cut into."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_image_tokens(self) -> int:
        """Places that a picture takes in a prompt: one for each vector that comes out of the projector."""
        return self.num_patches + self.keeps_class_token


@dataclass(frozen=True)
class Qwen2ImageProcessorConfig:
    """The settings of transformers' Qwen2VLImageProcessor. A picture keeps its proportions, and roughly its size."""

    min_pixels: int  # a smaller picture grows
    max_pixels: int  # a larger one shrinks
    resample: int  # PIL.Image.Resampling
    values: PixelValues


@dataclass(frozen=True)
class Qwen2VisionShape:
    """Qwen2-VL's vision tower, and the merger behind it."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels of a side
    temporal_patch_size: int  # pictures of a video that one vector holds; a still picture stands for all of them
    merge_size: int  # squares of a side that become one vector of the language model
    hidden_act: str
    rope_theta: float
    processor: Qwen2ImageProcessorConfig

    @property
    def unit(self) -> int:
        """Pixels of the side of what takes one place in a prompt."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class MultiModalShape:
    """Of models that see."""

    image_token: int | None = None  # id of the token that stands for a picture in a prompt; None: text alone
    vision: VisionShape | None = None
    qwen2_vision: Qwen2VisionShape | None = None
    mrope_section: tuple[int, ...] = ()  # pairs of a head that turn with each component of a position; (): only one
