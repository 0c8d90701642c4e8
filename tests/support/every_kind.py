"""Settings of which each makes another engine of the same model: every backend of this machine, every number format of weights."""

from __future__ import annotations

from typing import Any

from stage03_engine.core.features.quantization.manifest import METHODS
from stage04_kernels.attention import BACKENDS as ATTENTION
from stage04_kernels.backends.linear import BACKENDS as LINEAR, linear_backend_problem

BACKENDS: list[dict[str, Any]] = [
    *({"linear_backend": name} for name in LINEAR if linear_backend_problem(name) is None),
    *({"attention_backend": name} for name in ATTENTION if not name.startswith("triton")),
]
KINDS: list[dict[str, Any]] = [
    *BACKENDS,
    *(
        {"quantization": name} | ({"linear_backend": "torch"} if made[1] is None else {})
        for name, made in METHODS.items()
    ),
]
