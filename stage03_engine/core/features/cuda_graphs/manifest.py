"""Recorded steps: what `--compilation-config` says about them (compilation/), and the flag that turns them off."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_ROOM = "stage03_engine.core.features.cuda_graphs."
NONE, FULL_DECODE_ONLY, FULL_AND_PIECEWISE = "NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"  # modes.py
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnforceEager:
    """Part of DeviceConfig."""

    enforce_eager: bool = option(
        False,
        "no recorded decode steps: launch each kernel by itself (without it: CUDA graphs on a GPU, and on a CPU one call for all native "
        "functions of a step of up to 8 requests); the tokens are the same",
    )


RECORDABLE = ("torch", "reference", "triton-interpret")
"""Attention backends of a CPU that a simulation sees; of these the kernels alone read nothing but tensors, so that a decode step can be recorded whole."""


class CudaGraphFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for what cannot be recorded as `--compilation-config` asks."""
        asked, device = getattr(config, "compilation_config", None), config.device_config
        mode, simulate = getattr(asked, "cudagraph_mode", None), getattr(asked, "cudagraph_simulate", False)
        given = (getattr(asked, "compilation_config", None) or {}).get("cudagraph_mode")
        if given and mode is None and given != NONE:
            logger.warning(
                "cudagraph_mode %s has no effect on a CPU; cudagraph_simulate shows there what it would do", given
            )
        if mode in (None, NONE) or not (simulate or given):  # a level takes what it can have
            return
        if device.enforce_eager:
            logger.warning("cudagraph_mode %s has no effect with enforce_eager", mode)
            return
        if str(given).upper() == "FULL":
            logger.warning("cudagraph_mode FULL becomes %s: mixed steps cannot be recorded whole here", mode)
        backend, model = device.attention_backend, config.model_config
        whole = mode in (FULL_DECODE_ONLY, FULL_AND_PIECEWISE)
        kernels = ("triton-interpret",) if simulate else ("triton",)
        several = getattr(getattr(config, "parallel_config", None), "world_size", 1) > 1
        for wrong, what, why in (
            (simulate and backend not in RECORDABLE, f"attention_backend {backend}", "a simulation sees torch's operations and Triton's kernels alone"),
            (simulate and getattr(device, "linear_backend", "torch") != "torch", "linear_backend other than torch", "a simulation does not see its products"),
            (simulate and getattr(model, "quantization", None) is not None, "quantization", "a simulation does not see its products"),
            (simulate and getattr(asked, "mode", 0) and getattr(asked, "backend", "") == "inductor", "backend inductor", "a simulation does not see its loops; take eager or aot_eager"),
            (simulate and getattr(model, "enable_sleep_mode", False), "enable_sleep_mode", "a recorded step would go on reading memory that was given back"),
            (whole and backend not in kernels, f"attention_backend {backend}", f"only {kernels[0]} records decode steps whole; PIECEWISE works with any"),
            (mode != FULL_DECODE_ONLY and getattr(asked, "mode", 0) == 1, "mode 1", "where torch.compile breaks its graphs, nothing can be cut; take mode 0 or 3"),
            (mode != FULL_DECODE_ONLY and several, "several workers", "what they send each other is not in a piece"),
            (getattr(config.observability_config, "trace_layers", False), "trace_layers", "a graph has no layers"),
            (config.supported_tasks != ("generate",), "this model", "it does not write text"),
            (getattr(device, "batch_invariant", False), "batch_invariant", "it runs the model in tiles"),
        ):  # fmt: skip
            if wrong:
                raise ConfigError(f"cudagraph_mode {mode} cannot be combined with {what}: {why}")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """On a GPU the runner compiles its kernels before the first request, and replays captured steps; a graph has no room
        for the spans of --trace-layers. With native.cpp on a CPU, decode steps are recorded too."""
        device, layers = config.device_config, getattr(config.observability_config, "trace_layers", False)
        asked = getattr(config, "compilation_config", None)
        mode = getattr(asked, "cudagraph_mode", None)
        recorded = not (device.enforce_eager or layers or mode == NONE)
        several = getattr(getattr(config, "parallel_config", None), "world_size", 1) > 1  # what they send is not native
        if device.attention_backend == "native" and "generate" in config.supported_tasks and not several:
            return {"runner": [_ROOM + "native_graphs:NativeGraphHook"] * recorded}
        graphs = [_ROOM + "graph_hook:CudaGraphHook"] * recorded
        if device.attention_backend == "triton":
            return {"runner": [_ROOM + "warm_up:WarmUpHook", *graphs]}
        return {"runner": graphs} if mode is not None else {}  # in pieces, with any attention

    @staticmethod
    def start_rows(config: VllmConfig) -> list[tuple[str, str, str]]:
        """What will be recorded before the first request."""
        if _ROOM + "graph_hook:CudaGraphHook" not in CudaGraphFlags.hooks(config).get("runner", ()):
            return []
        from stage03_engine.core.features.cuda_graphs.plan import Plan

        plan = Plan.of(config)
        return [plan.row(config)] if plan.num_graphs else []


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
    events=("graphs.captured", "graphs.dispatched"),
)
