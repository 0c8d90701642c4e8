"""`--hf-overrides`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig
    from stage03_engine.model_shape import ModelShape


@dataclass(frozen=True)
class HfOverrides:
    """Part of ModelConfig."""

    hf_overrides: dict[str, Any] | None = option(
        None,
        'keys of config.json that count instead of the model\'s own, as JSON: {"num_hidden_layers": 2}; with dummy weights of a known '
        "shape too",
    )


class HfOverridesFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a model whose config.json another library reads."""
        if config.model_config.hf_overrides and "transcription" in config.supported_tasks:
            raise ConfigError("hf_overrides does not reach Whisper: transformers reads its config.json")


def overridden(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of config.json, as `settings` change them."""
    if not settings.get("hf_overrides"):
        return values
    from stage03_engine.args.features.hf_overrides import overrides

    return overrides.overridden(values, settings["hf_overrides"])


def changed_shape(shape: ModelShape, settings: Mapping[str, Any]) -> ModelShape:
    """A known shape, as `settings` change it. Raises ConfigError."""
    if not settings.get("hf_overrides"):
        return shape
    from stage03_engine.args.features.hf_overrides import overrides

    return overrides.changed_shape(shape, settings["hf_overrides"])


FEATURE = Feature(
    name="hf_overrides",
    help="changes to a model's config.json, for one run",
    room=__package__,
    settings={"ModelConfig": HfOverrides, "VllmConfig": HfOverridesFlags},
    parts=(
        Part("engine", ".manifest:overridden", key="config_json"),
        Part("engine", ".manifest:changed_shape", key="changed_shape"),
    ),
)
