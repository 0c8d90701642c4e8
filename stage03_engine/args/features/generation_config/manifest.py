"""`--generation-config` and `--override-generation-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.model_path import ModelFiles


@dataclass(frozen=True)
class GenerationConfig:
    """Part of ModelConfig."""

    generation_config: str = option(
        "auto",
        "where sampling defaults come from: auto = generation_config.json of the model, vllm = nowhere, or a folder",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, 'sampling defaults that take precedence over those, as JSON: {"temperature": 0.5, "top_k": 20}'
    )


class SamplingDefaults:
    """Part of VllmConfig."""

    @staticmethod
    def resolve(values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
        """How to sample where a request does not say. Raises ConfigError."""
        from stage03_engine.args.features.generation_config.generation import default_sampling_params

        return {"default_sampling_params": default_sampling_params(values, files.model_path)}


FEATURE = Feature(
    name="generation_config",
    help="sampling defaults of the model",
    room=__package__,
    settings={"ModelConfig": GenerationConfig, "VllmConfig": SamplingDefaults},
)
