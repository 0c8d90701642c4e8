"""The flag that turns recorded decode steps off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_ROOM = "stage03_engine.core.features.cuda_graphs."


@dataclass(frozen=True)
class EnforceEager:
    """Part of DeviceConfig."""

    enforce_eager: bool = option(
        False,
        "no recorded decode steps: launch each kernel by itself (without it: CUDA graphs on a GPU, and on a CPU one call for all native "
        "functions of a step of up to 8 requests); the tokens are the same",
    )


class CudaGraphFlags:
    """Part of VllmConfig."""

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """On a GPU the runner compiles its kernels before the first request, and replays captured decode steps; a graph has no room
        for the spans of --trace-layers. With native.cpp on a CPU, decode steps are recorded too."""
        device, layers = config.device_config, getattr(config.observability_config, "trace_layers", False)
        recorded = not (device.enforce_eager or layers)
        several = getattr(getattr(config, "parallel_config", None), "world_size", 1) > 1  # what they send is not native
        if device.attention_backend == "native" and "generate" in config.supported_tasks and not several:
            return {"runner": [_ROOM + "native_graphs:NativeGraphHook"] * recorded}
        if device.attention_backend != "triton":
            return {}
        return {"runner": [_ROOM + "warm_up:WarmUpHook", *[_ROOM + "cuda_graphs:CudaGraphHook"] * recorded]}


FEATURE = Feature(
    name="cuda_graphs",
    help="decode steps that are recorded once and replayed: CUDA graphs, and their counterpart on a CPU",
    room=__package__,
    settings={"DeviceConfig": EnforceEager, "VllmConfig": CudaGraphFlags},
    after=(
        "distributed",
        "linear_backend",
        "quantization",
    ),
    events=("graphs.captured",),
)
