"""Qwen2-VL's files, and how large its pictures are (Wang et al. 2024, "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at
Any Resolution"; vllm/model_executor/models/qwen2_vl.py, Qwen2VLProcessingInfo). Imports no torch.

A picture keeps its proportions, and within two bounds its size; it takes as many places in the prompt as it has units.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import Config
from stage03_engine.model_formats.llama import read_llama
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.llava import ACTIVATIONS
from stage03_engine.multimodal.processor_files import pixel_values, processor_file, section
from stage03_engine.multimodal.shape_fields import Qwen2ImageProcessorConfig, Qwen2VisionShape

if TYPE_CHECKING:
    from PIL.Image import Image

KWARGS = "mm_processor_kwargs"
MOST_LONGER = 200  # times as long as it is wide, at most
MOST_PIXELS = 1 << 28
_TEXT = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "max_window_layers": 80,
}  # fmt: skip
_VISION = {
    "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "mlp_ratio": 4, "hidden_act": "quick_gelu",
}  # fmt: skip
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
"""transformers leaves out what has its own default. The edges of a size are numbers of pixels here."""


class Qwen2VLProcessingInfo:
    """What is known of Qwen2-VL."""

    placeholder, modalities = "<|vision_start|><|image_pad|><|vision_end|>", ("image",)
    runner_hooks = ("stage03_engine.core.features.multimodal.mrope:MRopeHook",)

    def __init__(self, shape: ModelShape) -> None:
        assert shape.qwen2_vision is not None
        self._unit, self._processor = shape.qwen2_vision.unit, shape.qwen2_vision.processor
        least, most = (pixels / self._unit**2 for pixels in (self._processor.min_pixels, self._processor.max_pixels))
        # A long thin picture has one row at least, and the sides of one that grows are rounded up.
        thin, long = math.sqrt(least / MOST_LONGER), math.sqrt(least * MOST_LONGER)
        self.most_tokens = math.floor(max(most, math.sqrt(most * MOST_LONGER), (thin + 1) * (long + 1)))
        self.least_bytes = self._unit**2 * 3

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in whole units, about the same proportions, and within the two bounds (transformers: smart_resize). Raises
        ValueError for a picture that is too long and thin."""
        if max(width, height) > MOST_LONGER * min(width, height):
            raise ValueError(f"is more than {MOST_LONGER} times as long as it is wide")
        unit, settings = self._unit, self._processor
        rounded = round(width / unit) * unit, round(height / unit) * unit
        if rounded[0] * rounded[1] > settings.max_pixels:
            shrinks = math.sqrt((height * width) / settings.max_pixels)
            wide, high = (max(unit, math.floor(side / shrinks / unit) * unit) for side in (width, height))
            return wide, high
        if rounded[0] * rounded[1] < settings.min_pixels:
            grows = math.sqrt(settings.min_pixels / (height * width))
            wide, high = (math.ceil(side * grows / unit) * unit for side in (width, height))
            return wide, high
        return rounded

    def fitted(self, image: Image) -> Image:
        """Resized."""
        return image.resize(self.resized_size(*image.size), self._processor.resample)

    def num_tokens(self, width: int, height: int) -> int:
        """One for each unit."""
        if width % self._unit or height % self._unit:
            return 0
        tokens = width // self._unit * (height // self._unit)
        return tokens if tokens <= self.most_tokens else 0


def with_kwargs(values: dict[str, Any], settings: Any) -> dict[str, Any]:
    """config.json with the setting in it. Raises ConfigError for another model."""
    if values.get("model_type") != "qwen2_vl":
        raise ConfigError(f"{KWARGS} is for Qwen2-VL, whose pictures keep their size; leave it out")
    return values | {KWARGS: settings.mm_processor_kwargs}


def read_qwen2_vl(config: Config, architecture: str) -> ModelShape:
    """A Qwen2, and what it sees with. Raises ConfigError. Published files have the sizes of the Qwen2 outside; newer versions of
    transformers write them as `text_config`."""
    outside = {} if config.values.get("text_config") else config.values
    text = section(config, "text_config", _TEXT | outside)
    text.only({"model_type": ("qwen2_vl_text", "qwen2_vl")})
    text.values["tie_word_embeddings"] = config.flag("tie_word_embeddings", False) or text.flag(
        "tie_word_embeddings", False
    )
    mrope_section = _without_mrope(text)
    shape = replace(read_llama(text, "Qwen2ForCausalLM"), architecture=architecture)
    if len(mrope_section) != 3 or not all(type(pairs) is int and pairs >= 0 for pairs in mrope_section):
        config.refuse(f"mrope_section must be three numbers of pairs, not {mrope_section!r}")
    if sum(mrope_section) * 2 != shape.head_dim:
        config.refuse(f"mrope_section {mrope_section} must have the {shape.head_dim // 2} pairs of a head")
    return replace(  # type: ignore[call-arg]
        shape,
        image_token=config.size("image_token_id", 151655),
        qwen2_vision=_vision(config, shape.hidden_size),
        mrope_section=tuple(mrope_section),
    )


def _without_mrope(text: Config) -> list[int]:
    """The pairs of a head that turn with each component of a position. What is left of the rotary embedding is as any other's."""
    key = "rope_parameters" if text.values.get("rope_parameters") is not None else "rope_scaling"
    given = text.values.get(key) or {}
    if not isinstance(given, dict):
        text.refuse(f"{key} must be an object, not {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    rest = {name: value for name, value in given.items() if name not in ("mrope_section", "type", "rope_type")}
    text.values[key] = rest | {"rope_type": "default" if kind == "mrope" else kind}
    sections: list[int] = given.get("mrope_section", [16, 24, 24])
    return sections if isinstance(sections, list) else text.refuse(f"mrope_section must be a list, not {sections!r}")


def _vision(config: Config, text_size: int) -> Qwen2VisionShape:
    vision = section(config, "vision_config", _VISION)
    vision.only(
        {
            "model_type": ("qwen2_vl_vision", "qwen2_vl"),
            "in_channels": (3,),
            "in_chans": (3,),
            "hidden_act": ACTIVATIONS,
            "hidden_size": (text_size,),
        }
    )
    size, num_heads = vision.size("embed_dim"), vision.size("num_heads")
    if size % (4 * num_heads):
        config.refuse(f"vision_config: embed_dim {size} is not a multiple of 4 times num_heads {num_heads}")
    ratio, rope = vision.values["mlp_ratio"], vision.values.get("rope_parameters") or {}
    theta: Any = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else None
    if type(ratio) not in (int, float) or not 1 <= size * ratio < 2**31:
        config.refuse(f"vision_config: mlp_ratio must be a positive number, not {ratio!r}")
    if type(theta) not in (int, float) or not 0 < theta < 1e12 or rope.get("rope_type", "axial") != "axial":
        config.refuse(f"vision_config: rope_parameters must have the type axial and a positive theta, not {rope!r}")
    sizes = [vision.size(key) for key in ("patch_size", "temporal_patch_size", "spatial_merge_size")]
    return Qwen2VisionShape(
        hidden_size=size,
        intermediate_size=int(size * ratio),
        num_layers=vision.size("depth"),
        num_heads=num_heads,
        patch_size=sizes[0],
        temporal_patch_size=sizes[1],
        merge_size=sizes[2],
        hidden_act=vision.values["hidden_act"],
        rope_theta=float(theta),
        processor=_processor(config, *sizes),
    )


def _processor(config: Config, patch_size: int, temporal_patch_size: int, merge_size: int) -> Qwen2ImageProcessorConfig:
    file = processor_file(config)
    sizes = {"patch_size": (patch_size,), "temporal_patch_size": (temporal_patch_size,), "merge_size": (merge_size,)}
    file.only({"do_resize": (True,), **sizes})
    bounds = _SIZE | (given if isinstance(given := file.values.get("size"), dict) else {})
    least, most = (
        file.values.get(key) or bounds[edge]
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    kwargs = config.values.get(KWARGS) or {}
    if unknown := kwargs.keys() - {"min_pixels", "max_pixels"}:
        raise ConfigError(f"{KWARGS} has min_pixels and max_pixels, and no {str(min(unknown))[:100]!r}")
    least, most = kwargs.get("min_pixels", least), kwargs.get("max_pixels", most)
    whole, unit = all(type(number) is int for number in (least, most)), (patch_size * merge_size) ** 2
    if not whole or not 1 <= least <= most <= MOST_PIXELS or most < unit:
        why = f"must be positive whole numbers, the second one at least the first, {unit} at least and {MOST_PIXELS} at most"
        raise ConfigError(
            f"{KWARGS if kwargs else file.path}: min_pixels and max_pixels {why}, not {least!r} and {most!r}"
        )
    return Qwen2ImageProcessorConfig(least, most, file.values.get("resample", 3), pixel_values(file))
