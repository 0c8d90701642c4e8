"""The flag that chooses what multiplies by the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


KERNELS = "stage04_kernels.backends.linear"
HOOK = "stage03_engine.core.features.linear_backend.pack:PackedWeightsHook"


@dataclass(frozen=True)
class LinearBackend:
    """Part of DeviceConfig."""

    linear_backend: str = option(
        "auto",
        "matrix products with the weights, on a CPU: torch (plain), native (packed, compiled by this machine's C++ compiler), onednn "
        "(packed), module:Class of your own; auto measures them for some milliseconds at start and takes the fastest",
    )


class LinearBackendFlags:
    """Part of VllmConfig."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """--batch-invariant does not measure: its arithmetic is the same at every start."""
        if not values.get("batch_invariant", False):
            return {}
        return {"linear_backend": ("torch" if _problem("native") else "native", "--batch-invariant")}

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError if the backend is unknown, or cannot run here."""
        name, dtype = config.device_config.linear_backend, config.model_config.dtype
        if (problem := _problem(name)) is not None:
            raise ConfigError(f"linear_backend {name}: {problem}")
        if name not in ("auto", "torch") and config.device_config.device != "cpu":
            raise ConfigError(f"linear_backend {name} needs --device cpu, not {config.device_config.device}")
        if name in ("native", "onednn") and dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"linear_backend {name} does not know {dtype}; use float32 or bfloat16")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """On a CPU the runner packs the weights once they are loaded; --quantization does it itself, unless it only names the format of the checkpoint."""
        device, model = config.device_config, config.model_config
        own = getattr(model, "checkpoint_quantization", None) is not None
        quantized = getattr(model, "quantization", None) is not None and not own
        packs = device.device == "cpu" and device.linear_backend != "torch" and is_there(KERNELS) and not quantized
        return {"runner": [HOOK]} if packs else {}


def _problem(name: str) -> str | None:
    """Why this backend cannot be used on this machine; None if it can."""
    if is_there(KERNELS):
        problem: str | None = load(f"{KERNELS}:linear_backend_problem")(name)
        return problem
    return None if name in ("auto", "torch") else f"not installed: {KERNELS} is missing"


FEATURE = Feature(
    name="linear_backend",
    help="which code multiplies by the weights on a CPU: native, oneDNN, torch, or your own",
    room=__package__,
    settings={"DeviceConfig": LinearBackend, "VllmConfig": LinearBackendFlags},
    after=("distributed", "lora"),
    events=("weights.packed",),
)
