"""LLaVA's files: config.json and preprocessor_config.json, as transformers writes them (Liu et al. 2023, "Visual Instruction Tuning";
vllm/model_executor/models/llava.py, LlavaProcessingInfo). Imports no torch."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from stage03_engine.hf_config import Config, read_json
from stage03_engine.model_formats.llama import read_llama
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.shape_fields import ImageProcessorConfig, VisionShape

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
_FILES = ("preprocessor_config.json", "processor_config.json")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class LlavaInfo:
    """What the front end knows of LLaVA."""

    placeholder, modalities = "<image>", ("image",)

    def num_tokens(self, shape: ModelShape) -> int:
        """The same for each picture: all are brought to one size."""
        assert shape.vision is not None
        return shape.vision.num_image_tokens


LLAVA = LlavaInfo()


def read_llava(config: Config, architecture: str) -> ModelShape:
    """A Llama, and what it sees with. Raises ConfigError."""
    text, vision = _inner(config, "text_config", _LLAMA), _inner(config, "vision_config", _CLIP)
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
    return replace(shape, vision=_vision(config, vision))  # type: ignore[call-arg]


def _inner(config: Config, key: str, defaults: dict[str, Any]) -> Config:
    """An object inside config.json, with the defaults of its class."""
    values = config.values.get(key) or {}
    if not isinstance(values, dict):
        config.refuse(f"{key} must be an object")
    inner = copy(config)
    inner.values = defaults | values
    return inner


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
    token_key = "image_token_id" if "image_token_id" in config.values else "image_token_index"
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
        image_token=config.size(token_key, 32000),
        processor=read_processor(config, image_size),
    )


def read_processor(config: Config, image_size: int) -> ImageProcessorConfig:
    """From the file beside config.json; newer versions of transformers put it inside another. Raises ConfigError for settings that do not
    end in squares of `image_size`."""
    path = next((found for name in _FILES if (found := config.path.with_name(name)).is_file()), None)
    if path is None:
        config.refuse(f"there is no {_FILES[0]} beside it, which says how pictures are prepared")
    file, values = copy(config), read_json(path)
    file.path, file.values = path, values.get("image_processor", values)
    on = {name: file.flag(f"do_{name}", True) for name in ("resize", "center_crop", "rescale", "normalize")}
    file.only({"do_pad": (False, None), "do_convert_rgb": (True, None), "resample": (0, 1, 2, 3, 4, 5)})
    mean, std = (_three(file, *each) for each in (("image_mean", _CLIP_MEAN), ("image_std", _CLIP_STD)))
    resize = _size(file, "size", {"shortest_edge": 224}) if on["resize"] else None
    crop = _size(file, "crop_size", {"height": 224, "width": 224}) if on["center_crop"] else None
    end = crop if crop is not None else resize
    if end != (image_size, image_size):
        file.refuse(f"pictures must end as squares of {image_size} pixels, which is what vision_config says, not {end}")
    return ImageProcessorConfig(
        resize=resize,
        resample=file.values.get("resample", 3),
        crop=crop if isinstance(crop, tuple) else None,
        scale=file.epsilon("rescale_factor", 1 / 255) if on["rescale"] else 1.0,
        mean=mean if on["normalize"] else (0.0, 0.0, 0.0),
        std=std if on["normalize"] else (1.0, 1.0, 1.0),
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


def _three(file: Config, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = file.values.get(key) or default
    if len(given) != 3 or not all(type(number) in (int, float) for number in given):
        file.refuse(f"{key} must hold a number for each of the three channels, not {given!r}")
    if key == "image_std" and not all(given):
        file.refuse("image_std must not hold 0")
    return tuple(float(number) for number in given)
