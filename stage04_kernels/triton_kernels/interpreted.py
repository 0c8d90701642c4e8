"""The Triton kernels under Triton's interpreter, which this module switches on.

Triton reads TRITON_INTERPRET when it is imported: its own library consists of kernels too. So this module must be imported
first. Raises ValueError if triton was already imported without it.
"""

from __future__ import annotations

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise ValueError("triton-interpret must be chosen before triton is imported: set TRITON_INTERPRET=1")
os.environ["TRITON_INTERPRET"] = "1"

import stage04_kernels.triton_kernels.quick_interpreter  # noqa: F401 - for its effect
from stage04_kernels.triton_kernels.backend import LAYER_KERNELS, SAMPLER_KERNELS, triton_attention

__all__ = ["LAYER_KERNELS", "SAMPLER_KERNELS", "triton_attention"]
