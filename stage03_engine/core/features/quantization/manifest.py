"""The flag that chooses the number format of the weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


INT8, INT4, FP8 = (f"stage04_kernels.backends.{name}_linear" for name in ("int8", "int4", "fp8"))
METHODS = {
    "int8": (f"{INT8}:TorchInt8Linear", f"{INT8}:native_int8"),
    "int8_per_channel_weight_only": (f"{INT8}:TorchInt8Linear", f"{INT8}:native_int8_weight_only"),
    "int4": (f"{INT4}:torch_int4", f"{INT4}:native_int4"),
    "fp8": (f"{FP8}:TorchFp8Linear", None),
}
"""Name -> "module:function" that quantizes and packs a weight: the slow twin, and the one that is compiled for a CPU, if there is one."""
TRITON_BYTES = "stage04_kernels.triton_kernels.byte_linear"
TRITON = {
    "int8": f"{TRITON_BYTES}:triton_int8",
    "int8_per_channel_weight_only": f"{TRITON_BYTES}:triton_int8",
    "int4": "stage04_kernels.triton_kernels.int4_linear:triton_int4",
    "fp8": f"{TRITON_BYTES}:triton_fp8",
}
"""Method -> the same with a kernel of Triton's, which goes with the attention backends of that name."""
INTERPRETED = "stage04_kernels.triton_kernels.interpreted"
OUTPUT_MATRIX = {"int4": "int8"}
"""Method -> that of the output matrix, if it is another one: it alone did most of the harm."""
NATIVE_PROBLEM = "stage04_kernels.backends.native.library:problem"
NEEDED = (INT8, INT4, FP8, "stage04_kernels.backends.native.linear", "stage03_engine.core.features.linear_backend.pack")
HOOK = "stage03_engine.core.features.quantization.quantize:QuantizedWeightsHook"


@dataclass(frozen=True)
class Quantization:
    """Part of ModelConfig."""

    quantization: str | None = option(
        None,
        "number format of the weight matrices, made of any checkpoint at start: int8, with inputs of 8 bits where the processor multiplies "
        "those fastest (VNNI, dotprod), else of 16; int8_per_channel_weight_only, with inputs of 16 bits everywhere; int4, in groups of up to 128, "
        "with inputs of 8 bits and an output matrix of int8; fp8, on a GPU; none = that of --dtype, or of a checkpoint that is quantized",
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
                f"quantization {method} is not supported: it makes an ordinary checkpoint smaller, and is one of "
                f"{', '.join(METHODS)}"
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
        on_cpu = config.device_config.device == "cpu" and backend != "torch" and not takes_triton(config, method)
        if METHODS[method][1] is None and on_cpu:
            raise ConfigError(
                f"quantization {method} needs a GPU: no product of such weights is compiled for a CPU, where int8 is as small and fast"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner quantizes the weights once they are loaded."""
        own = getattr(config.model_config, "checkpoint_quantization", None) is not None
        return {} if own or config.model_config.quantization is None else {"runner": [HOOK]}


def product_of(config: Any, method: str) -> tuple[str, str]:
    """("module:function" that quantizes and packs a weight, why it is not the compiled one or "")."""
    twin, compiled = METHODS[method]
    if takes_triton(config, method):
        if config.device_config.attention_backend == "triton-interpret":
            importlib.import_module(INTERPRETED)  # before Triton itself
        return TRITON[method], ""
    return (twin, reason) if (reason := no_native(config)) or compiled is None else (compiled, "")


def takes_triton(config: Any, method: str) -> bool:
    """Does a kernel of Triton's multiply, as it does attention?"""
    device = config.device_config
    asked = device.attention_backend.startswith("triton") and getattr(device, "linear_backend", "auto") == "auto"
    return asked and method in TRITON


def no_native(config: Any) -> str:
    """Why no compiled product of quantized weights can be used; "" if it can."""
    device = config.device_config
    if device.device != "cpu":
        return f"no product of these weights is compiled for --device {device.device}"
    if getattr(device, "linear_backend", "auto") == "torch":
        return "--linear-backend torch"
    if config.model_config.dtype == "float16":
        return "the compiled products take float32 or bfloat16, not float16"
    problem: str | None = load(NATIVE_PROBLEM)()
    return problem or ""


FEATURE = Feature(
    name="quantization",
    help="weights of 8 or 4 bits",
    room=__package__,
    settings={"ModelConfig": Quantization, "VllmConfig": QuantizationFlags},
    after=("distributed", "lora"),
    events=("weights.quantized",),
)
