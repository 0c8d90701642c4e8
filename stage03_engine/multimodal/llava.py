"""LLaVA's files: config.json and preprocessor_config.json, as transformers writes them (Liu et al. 2023, "Visual Instruction Tuning";
vllm/model_executor/models/llava.py, LlavaProcessingInfo). Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stage03_engine.hf_config import Config
from stage03_engine.model_formats.llama import read_llama
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.processor_files import pixel_values, processor_file, section
from stage03_engine.multimodal.shape_fields import ImageProcessorConfig, VisionShape

if TYPE_CHECKING:
    from PIL.Image import Image

ACTIVATIONS = ("quick_gelu", "gelu")
_LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 32, "num_channels": 3, "hidden_act": "quick_gelu",
}  # fmt: skip
"""transformers leaves out what has its own default."""


class LlavaProcessingInfo:
    """What is known of LLaVA: all pictures are brought to one size, and so take equally many places."""

    placeholder, modalities, runner_hooks = "<image>", ("image",), ()

    def __init__(self, shape: ModelShape) -> None:
        assert shape.vision is not None
        self._side, self._processor = shape.vision.image_size, shape.vision.processor
        self.most_tokens, self.least_bytes = shape.vision.num_image_tokens, self._side**2 * 3

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height), before it is cropped. One number is the length of the shorter side; the other one keeps the proportions."""
        short = self._processor.resize
        if short is None:
            return width, height
        if isinstance(short, tuple):
            return short[1], short[0]
        if width <= height:
            return short, int(short * height / width)
        return int(short * width / height), short

    def fitted(self, image: Image) -> Image:
        """Resized, then cropped to its middle."""
        settings = self._processor
        if settings.resize is not None:
            image = image.resize(self.resized_size(*image.size), settings.resample)
        if settings.crop is None:
            return image
        high, wide = settings.crop
        left, top = (image.width - wide) // 2, (image.height - high) // 2
        return image.crop((left, top, left + wide, top + high))  # black where the picture is smaller

    def num_tokens(self, width: int, height: int) -> int:
        """The same for each."""
        return self.most_tokens if width == height == self._side else 0


def read_llava(config: Config, architecture: str) -> ModelShape:
    """A Llama, and what it sees with. Raises ConfigError."""
    text, vision = section(config, "text_config", _LLAMA), section(config, "vision_config", _CLIP)
    text.only({"model_type": ("llama",)})
    vision.only({"model_type": ("clip_vision_model",), "num_channels": (3,), "hidden_act": ACTIVATIONS})
    config.only(
        {
            "projector_hidden_act": ("gelu",),
            "vision_feature_select_strategy": ("default", "full"),
        }
    )
    if "tie_word_embeddings" in config.values:
        text.values["tie_word_embeddings"] = config.values["tie_word_embeddings"]
    shape = replace(read_llama(text, "LlamaForCausalLM"), architecture=architecture)
    token_key = "image_token_id" if "image_token_id" in config.values else "image_token_index"
    return replace(shape, image_token=config.size(token_key, 32000), vision=_vision(config, vision))  # type: ignore[call-arg]


def _vision(config: Config, vision: Config) -> VisionShape:
    num_layers, hidden_size, num_heads = (
        vision.size(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    image_size, patch_size = vision.size("image_size"), vision.size("patch_size")
    if hidden_size % num_heads:
        config.refuse(f"vision_config: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    layer = config.values.get("vision_feature_layer", -2)
    if type(layer) is not int or not -num_layers - 1 <= layer <= num_layers:
        config.refuse(f"vision_feature_layer must be one of the {num_layers} layers, not {layer!r}")
    return VisionShape(
        hidden_size=hidden_size,
        intermediate_size=vision.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
        layer_norm_eps=vision.epsilon("layer_norm_eps", 1e-5),
        hidden_act=vision.values["hidden_act"],
        num_used_layers=layer if layer >= 0 else num_layers + 1 + layer,
        keeps_class_token=config.values.get("vision_feature_select_strategy", "default") == "full",
        projector_act=config.values.get("projector_hidden_act", "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", True),
        processor=read_processor(config, image_size),
    )


def read_processor(config: Config, image_size: int) -> ImageProcessorConfig:
    """Raises ConfigError for settings that do not end in squares of `image_size`."""
    file = processor_file(config)
    file.only({"do_pad": (False, None)})
    resize = _size(file, "size", {"shortest_edge": 224}) if file.flag("do_resize", True) else None
    crop = _size(file, "crop_size", {"height": 224, "width": 224}) if file.flag("do_center_crop", True) else None
    end = crop if crop is not None else resize
    if end != (image_size, image_size):
        file.refuse(f"pictures must end as squares of {image_size} pixels, which is what vision_config says, not {end}")
    return ImageProcessorConfig(
        resize=resize,
        resample=file.values.get("resample", 3),
        crop=crop if isinstance(crop, tuple) else None,
        values=pixel_values(file),
    )


def _size(file: Config, key: str, default: dict[str, int]) -> tuple[int, int] | int:
    """(height, width), or the length of the shorter side. One number means a square, or with `size` the shorter side."""
    given = file.values.get(key) or default
    if type(given) is int:
        given = {"shortest_edge": given} if key == "size" else {"height": given, "width": given}
    sides = given if isinstance(given, dict) else {}
    short, high, wide = (sides.get(name) for name in ("shortest_edge", "height", "width"))
    if type(short) is int and short > 0:
        return short
    if type(high) is int and type(wide) is int and min(high, wide) > 0:
        return high, wide
    file.refuse(f"{key} must have height and width, or shortest_edge, not {given!r}")
