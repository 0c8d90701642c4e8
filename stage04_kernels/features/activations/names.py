"""The activations that relatives of GPT-2 were trained with, under transformers' names (transformers/activations.py, ACT2CLS).
Imports no torch: reading a config.json needs the names alone.
"""

from __future__ import annotations

_TORCH, _HERE = "torch.nn.functional:", "stage04_kernels.features.activations.functions:"
ACTIVATIONS = {
    "gelu": _TORCH + "gelu",
    "gelu_10": _HERE + "gelu_10",
    "gelu_accurate": _HERE + "gelu_tanh",
    "gelu_fast": _HERE + "gelu_tanh",
    "gelu_python": _TORCH + "gelu",
    "gelu_python_tanh": _HERE + "gelu_tanh",
    "hardswish": _TORCH + "hardswish",
    "laplace": _HERE + "laplace",
    "leaky_relu": _TORCH + "leaky_relu",
    "linear": _HERE + "linear",
    "mish": _TORCH + "mish",
    "quick_gelu": _HERE + "quick_gelu",
    "relu": _TORCH + "relu",
    "relu2": _HERE + "relu2",
    "relu6": _TORCH + "relu6",
    "sigmoid": _TORCH + "sigmoid",
    "silu": _TORCH + "silu",
    "sqrtsoftplus": _HERE + "sqrtsoftplus",
    "swish": _TORCH + "silu",
    "tanh": _TORCH + "tanh",
}
"""Name -> module:function. GPT-2's own are not here; prelu and xielu are missing, because they have weights to be learnt."""
