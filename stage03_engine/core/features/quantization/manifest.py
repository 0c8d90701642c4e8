"""The flag that chooses the number format of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


METHODS = ("int8", "int8_per_channel_weight_only")
KERNELS = "stage04_kernels.backends.int8_linear"
NATIVE_PROBLEM = "stage04_kernels.backends.native.library:problem"
NEEDED = (KERNELS, "stage04_kernels.backends.native.linear", "stage03_engine.core.features.linear_backend.pack")
HOOK = "stage03_engine.core.features.quantization.quantize:QuantizedWeightsHook"


@dataclass(frozen=True)
class Quantization:
    """Part of ModelConfig."""

    quantization: str | None = option(
        None,
        "number format of the weight matrices, made of any checkpoint at start: int8, with inputs of 8 bits where the processor multiplies "
        "those fastest (VNNI, dotprod), else of 16; int8_per_channel_weight_only, with inputs of 16 bits everywhere; none = that of --dtype",
        aliases=("-q",),
    )


class QuantizationFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for another method, and for settings that do not go with it."""
        method, backend = config.model_config.quantization, getattr(config.device_config, "linear_backend", "auto")
        if method is None or getattr(config.model_config, "checkpoint_quantization", None):
            return  # the checkpoint's own format, which its room has compared
        if method not in METHODS:
            raise ConfigError(
                f"quantization {method} is not supported: weights are quantized here, of a checkpoint that is not, to "
                f"{' or '.join(METHODS)}"
            )
        for module in NEEDED:
            if not is_there(module):
                raise ConfigError(f"quantization {method} is not installed: {module} is missing")
        if backend not in ("auto", "native", "torch"):
            raise ConfigError(f"quantization {method} needs linear_backend auto, native or torch, not {backend}")
        if backend == "native" and config.model_config.dtype == "float16":
            raise ConfigError(
                f"quantization {method} with linear_backend native needs float32 or bfloat16, not float16"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner quantizes the weights once they are loaded."""
        own = getattr(config.model_config, "checkpoint_quantization", None) is not None
        return {} if own or config.model_config.quantization is None else {"runner": [HOOK]}


def product_of(config: Any) -> tuple[str, str]:
    """("module:function" that quantizes and packs a weight, why it is not the compiled one or "")."""
    device, dtype = config.device_config, config.model_config.dtype
    if device.device != "cpu":
        reason = f"there is no int8 kernel for --device {device.device}"
    elif getattr(device, "linear_backend", "auto") == "torch":
        reason = "--linear-backend torch"
    elif dtype == "float16":
        reason = "the compiled products take float32 or bfloat16, not float16"
    else:
        reason = load(NATIVE_PROBLEM)() or ""
    if reason:
        return f"{KERNELS}:TorchInt8Linear", reason
    only = config.model_config.quantization == "int8_per_channel_weight_only"
    return f"{KERNELS}:native_int8{'_weight_only' if only else ''}", ""


FEATURE = Feature(
    name="quantization",
    help="weights of 8 bits",
    room=__package__,
    settings={"ModelConfig": Quantization, "VllmConfig": QuantizationFlags},
    after=("distributed", "lora"),
    events=("weights.quantized",),
)
