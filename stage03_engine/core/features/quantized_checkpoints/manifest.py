"""Which quantized checkpoints can be read, and what goes with them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig
    from stage03_engine.model_path import ModelFiles

KEYS = ("quantization_config", "compression_config")
"""Of config.json. The second is what compressed-tensors wrote before."""
HOOK = "stage03_engine.core.features.quantized_checkpoints.load:QuantizedCheckpointHook"


@dataclass(frozen=True)
class CheckpointQuantization:
    """Part of ModelConfig."""

    checkpoint_quantization: dict[str, Any] | None = internal(None)  # quantization_config of config.json


class CheckpointFlags:
    """Part of VllmConfig."""

    @staticmethod
    def resolve(values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
        """What config.json says. Random weights (`--load-format dummy`) are not quantized. Raises ConfigError for what cannot be read."""
        if files.model_path is None or values.get("load_format") == "dummy":
            return {}
        from stage03_engine.hf_config import Config  # not while the settings are put together

        path = Path(files.model_path) / "config.json"
        config = Config(path, SimpleNamespace(**values)).values
        key = next((key for key in KEYS if config.get(key) is not None), None)
        if key is None:
            return {}
        from stage03_engine.core.features.quantized_checkpoints.schemes import checked

        found: dict[str, Any] = {"checkpoint_quantization": checked(path, key, config[key])}
        if config[key].get("kv_cache_scheme") and values.get("kv_cache_dtype") == "auto":
            found["kv_cache_dtype"] = "fp8"  # as in vLLM
        return found

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError if --quantization asks for another format than the checkpoint has (vLLM: ModelConfig._verify_quantization)."""
        found = config.model_config.checkpoint_quantization
        asked = getattr(config.model_config, "quantization", None)
        if found is not None and getattr(config, "is_whisper", False):
            raise ConfigError(f"a Whisper model that is quantized with {found['quant_method']} is not supported")
        if found is not None and config.model_config.load_format == "sharded_state":
            raise ConfigError(f"load_format sharded_state has no slices of weights in {found['quant_method']}")
        if found is not None and asked not in (None, found["quant_method"]):
            raise ConfigError(
                f"quantization {asked} does not match the checkpoint, which is quantized with {found['quant_method']}: leave it out"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner makes weights of what the checkpoint holds."""
        return {} if config.model_config.checkpoint_quantization is None else {"runner": [HOOK]}


FEATURE = Feature(
    name="quantized_checkpoints",
    help="checkpoints that are quantized: GPTQ, AWQ, compressed-tensors, fp8",
    room=__package__,
    settings={"ModelConfig": CheckpointQuantization, "VllmConfig": CheckpointFlags},
    parts=(Part("engine", HOOK, key="quantized_checkpoints"),),
    needs=("quantization",),
    events=("weights.quantized",),
)
