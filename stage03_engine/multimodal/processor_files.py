"""What config.json and preprocessor_config.json of models that see have in common, as transformers writes them. Imports no torch."""

from __future__ import annotations

from copy import copy
from typing import Any

from stage03_engine.hf_config import Config, read_json
from stage03_engine.multimodal.shape_fields import PixelValues

_FILES = ("preprocessor_config.json", "processor_config.json")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def section(config: Config, key: str, defaults: dict[str, Any]) -> Config:
    """An object inside config.json, with the defaults of its class. Raises ConfigError."""
    values = config.values.get(key) or {}
    if not isinstance(values, dict):
        config.refuse(f"{key} must be an object")
    inner = copy(config)
    inner.values = defaults | values
    return inner


def processor_file(config: Config) -> Config:
    """The file beside config.json that says how pictures are prepared; newer versions of transformers put it inside another. Raises
    ConfigError."""
    path = next((found for name in _FILES if (found := config.path.with_name(name)).is_file()), None)
    if path is None:
        config.refuse(f"there is no {_FILES[0]} beside it, which says how pictures are prepared")
    file, values = copy(config), read_json(path)
    file.path, file.values = path, values.get("image_processor", values)
    if not isinstance(file.values, dict):
        file.refuse(f"image_processor must be an object, not {file.values!r}")
    file.only({"do_convert_rgb": (True, None), "resample": (0, 1, 2, 3, 4, 5)})
    return file


def pixel_values(file: Config) -> PixelValues:
    """Raises ConfigError."""
    mean, std = (_three(file, *each) for each in (("image_mean", _CLIP_MEAN), ("image_std", _CLIP_STD)))
    scales, normalizes = file.flag("do_rescale", True), file.flag("do_normalize", True)
    return PixelValues(
        scale=file.epsilon("rescale_factor", 1 / 255) if scales else 1.0,
        mean=mean if normalizes else (0.0, 0.0, 0.0),
        std=std if normalizes else (1.0, 1.0, 1.0),
    )


def _three(file: Config, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = file.values.get(key) or default
    three = isinstance(given, (list, tuple)) and len(given) == 3
    if not three or not all(type(number) in (int, float) and abs(number) < 1e6 for number in given):
        file.refuse(f"{key} must hold a number for each of the three channels, not {given!r}")
    if key == "image_std" and not all(given):
        file.refuse("image_std must not hold 0")
    return tuple(float(number) for number in given)
