"""The flag that turns CUDA graphs off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.args.fields import option

_ROOM = "stage03_engine.core.features.cuda_graphs."


@dataclass(frozen=True)
class EnforceEager:
    """Part of DeviceConfig."""

    enforce_eager: bool = option(
        False, "no CUDA graphs: launch each kernel of a decode step by itself (GPU only; the tokens are the same)"
    )


class CudaGraphFlags:
    """Part of VllmConfig."""

    def hooks(self: Any) -> dict[str, list[str]]:
        """On a GPU the runner compiles its kernels before the first request, and replays captured decode steps; a graph has no room
        for the spans of --trace-layers."""
        device, layers = self.device_config, getattr(self.observability_config, "trace_layers", False)
        if device.attention_backend != "triton":
            return {}
        graphs = [] if device.enforce_eager or layers else [_ROOM + "cuda_graphs:CudaGraphHook"]
        return {"runner": [_ROOM + "warm_up:WarmUpHook", *graphs]}
