"""The flags of the debugging tools: checks after every step, and spans per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.args.fields import option


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
        False, "record the embedding, and attention and MLP of each layer, as spans of their own (slow)"
    )


class DebugFlags:
    """Part of VllmConfig."""

    def hooks(self: Any) -> dict[str, list[str]]:
        """--check-invariants checks the scheduler's books; --trace-layers records the layers of each forward pass."""
        checks = self.scheduler_config.check_invariants
        layers = self.observability_config.trace_layers
        return {
            "scheduler": ["stage03_engine.core.features.debug.scheduler_checks:CheckInvariantsHook"] if checks else [],
            "runner": ["stage03_engine.core.features.debug.layer_trace:LayerTraceHook"] if layers else [],
        }
