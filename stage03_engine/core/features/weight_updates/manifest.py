"""`--enable-weight-updates`: other weights for an engine that runs, for those who train what it serves (vllm/distributed/weight_transfer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig

_ROOM = "stage03_engine.core.features.weight_updates."
_FRONT = "stage03_engine.frontend.features.weight_updates.calls:"


@dataclass(frozen=True)
class WeightUpdates:
    """Part of ModelConfig."""

    enable_weight_updates: bool = option(
        False,
        "let the program that holds the engine replace its weights: LLM.update_weights, for learners; never over HTTP",
    )


@dataclass(frozen=True)
class WeightUpdateFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for what would keep something of the old weights."""
        if not config.model_config.enable_weight_updates:
            return
        model, parallel = config.model_config, getattr(config, "data_parallel_config", None)
        reasons = {
            "a quantized checkpoint": (
                getattr(model, "checkpoint_quantization", None),
                "a learner has no codes; --quantization makes them",
            ),
            "load_format sharded_state": (model.load_format == "sharded_state", "a learner has whole tensors"),
            "a model that hears": ("transcription" in config.supported_tasks, "its weights are transformers' own"),
            "engines on other machines": (getattr(parallel, "num_elsewhere", 0), "they cannot read the learner's file"),
            "nnodes above 1": (
                getattr(getattr(config, "parallel_config", None), "nnodes", 1) > 1,
                "other machines cannot read the learner's file",
            ),
        }
        for name, (given, why) in reasons.items():
            if given:
                raise ConfigError(f"enable_weight_updates cannot be combined with {name}: {why}")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The scheduler counts versions and keeps requests out meanwhile; the runner loads; an engine that comes later gets the newest weights."""
        if not config.model_config.enable_weight_updates:
            return {}
        return {
            "scheduler": [_ROOM + "scheduler_hook:WeightsSchedulerHook"],
            "runner": [_ROOM + "runner_hook:WeightsRunnerHook"],
            "async_llm": [_FRONT + "follow"],
        }


FEATURE = Feature(
    name="weight_updates",
    help="other weights for an engine that runs",
    room=__package__,
    also=("stage03_engine.frontend.features.weight_updates",),
    settings={"ModelConfig": WeightUpdates, "VllmConfig": WeightUpdateFlags},
    parts=(
        Part("call", ".scheduler_hook:prepare_weights", key="prepare_weights"),
        Part("call", ".scheduler_hook:update_weights", key="update_weights"),
        Part("call", ".scheduler_hook:keep_weights", key="keep_weights"),
        Part("llm", _FRONT + "update_weights", key="update_weights"),
        Part("async_llm", _FRONT + "update_weights_async", key="update_weights"),
    ),
    needs=("prefix_cache_reset",),
    after=("lora", "sleep"),
    conflicts={
        ("enable_lora", "enable_weight_updates"): "adapters belong to the weights that they were trained with",
        ("kv_transfer_config", "enable_weight_updates"): "its folder holds keys and values of the old weights",
        ("kv_offloading_size", "enable_weight_updates"): "its memory holds keys and values of the old weights",
    },
    events=("weights.updated", "weights.used"),
)
