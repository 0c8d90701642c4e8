"""Which number format a CPU or a GPU is fastest with, found without torch (vllm/platforms/cpu.py; config/model.py, _resolve_auto_dtype).

What looks at files takes the root of the file system, so that a test can show it another machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from stage03_engine.model_shape import ModelShape

_ROOT = Path("/")
_FAST_BFLOAT16 = ("amx_bf16", "avx512_bf16")  # as the kernel calls them
LARGE = 128 * 2**20  # bytes of float32 weights: more than the caches of nearly all CPUs


def bfloat16_flag(root: Path = _ROOT) -> str | None:
    """The instructions that make bfloat16 fast here, as /proc/cpuinfo names them; None if there are none, or if it does not say."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except (OSError, ValueError):
        return None
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return next((flag for flag in _FAST_BFLOAT16 if flag in flags), None)


def weight_bytes(shape: ModelShape) -> int:
    """About how many bytes the matrices of a model take in float32."""
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = shape.hidden_size * (heads + 2 * shape.intermediate_size)
    return 4 * (shape.num_layers * layer + shape.vocab_size * shape.hidden_size)


def cpu_dtype(shape: ModelShape, root: Path = _ROOT) -> tuple[str, str]:
    """(number format on a CPU, what decided).

    A step reads every weight once. If they come from memory, half the bytes are half the time, where the CPU multiplies
    bfloat16 without a detour; weights that stay in its cache gain nothing, and keep answers that are the same on every machine.
    """
    if weight_bytes(shape) <= LARGE:
        return "float32", "a small model on a CPU"
    if (flag := bfloat16_flag(root)) is not None:
        return "bfloat16", f"the CPU has {flag}"
    return "float32", f"the CPU ({platform.machine()}) has neither AMX nor AVX512-BF16"


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU that this process may use, asked of the driver's own library (NVML): this process has no
    torch. None if it does not answer."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    try:
        nvml, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        if nvml.nvmlInit_v2() != 0:
            return None
        major, minor = ctypes.c_int(), ctypes.c_int()
        found = nvml.nvmlDeviceGetHandleByIndex_v2(int(first) if first.isdecimal() else 0, ctypes.byref(handle))
        found = found or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        nvml.nvmlShutdown()
        return None if found != 0 else (major.value, minor.value)
    except (OSError, AttributeError):  # no such library, or one without these functions
        return None


def gpu_dtype(own: str, capability: tuple[int, int] | None) -> tuple[str, str]:
    """(number format on a GPU, what decided): the model's own, but 16 bits for float32, and float16 where the chip has no bfloat16."""
    preferred = "float16" if capability is not None and capability < (8, 0) else "bfloat16"
    if own == "float32":
        return preferred, "the model is float32, and a GPU multiplies 16 bits faster"
    if own == "bfloat16" and preferred == "float16":
        return preferred, "the model is bfloat16, which this GPU does not have"
    return own, "the model's own"
