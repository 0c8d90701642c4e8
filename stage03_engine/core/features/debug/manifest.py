"""The flags of the debugging tools: checks after every step, and spans per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_DEBUG = "stage03_engine.core.features.debug."


@dataclass(frozen=True)
class CheckInvariants:
    """Part of SchedulerConfig."""

    check_invariants: bool = option(
        False, "check after every step that no block and no request is lost or used twice (slow)"
    )


@dataclass(frozen=True)
class TraceLayers:
    """Part of ObservabilityConfig."""

    trace_layers: bool = option(
        False,
        "record embeddings, attention, KV write and MLP of each layer, and the final norm, as spans of their own (slow)",
    )


class DebugFlags:
    """Part of VllmConfig."""

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """--check-invariants checks the scheduler's books; --trace-layers records the layers of each forward pass, and any
        trace the steps of the sampler."""
        checks, observed = config.scheduler_config.check_invariants, config.observability_config
        traced = getattr(observed, "trace", None) is not None or getattr(observed, "trace_console", False)
        return {
            "scheduler": [_DEBUG + "scheduler_checks:CheckInvariantsHook"] * checks,
            "runner": [_DEBUG + "scheduler_checks:CheckSlotsHook"] * checks
            + [_DEBUG + "layer_trace:LayerTraceHook"] * observed.trace_layers
            + [_DEBUG + "sampler_trace:SamplerTraceHook"] * traced,
        }


FEATURE = Feature(
    name="debug",
    help="checks after every step, and spans of each layer in the trace",
    room=__package__,
    settings={"SchedulerConfig": CheckInvariants, "ObservabilityConfig": TraceLayers, "VllmConfig": DebugFlags},
    events=(
        "model.attention",
        "model.embedding",
        "model.final_norm",
        "model.kv_write",
        "model.mlp",
        "model.positional_embedding",
        "sampler.rules",
        "sampler.transform",
    ),
)
