"""`--hf-overrides`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class HfOverrides:
    """Part of ModelConfig."""

    hf_overrides: dict[str, Any] | None = option(
        None,
        'values that replace those in config.json, as JSON: {"num_hidden_layers": 2}; with --load-format dummy also the sizes of a '
        "known shape",
    )


class HfOverridesFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a model whose config.json another library reads."""
        if config.model_config.hf_overrides and "transcription" in config.supported_tasks:
            raise ConfigError("hf_overrides does not reach Whisper: transformers reads its config.json")


FEATURE = Feature(
    name="hf_overrides",
    help="changes to a model's config.json, for one run",
    room=__package__,
    settings={"ModelConfig": HfOverrides, "VllmConfig": HfOverridesFlags},
    parts=(
        Part("engine", ".overrides:overridden", key="config_json", flags=("hf_overrides",)),
        Part("engine", ".overrides:changed_shape", key="changed_shape", flags=("hf_overrides",)),
    ),
)
