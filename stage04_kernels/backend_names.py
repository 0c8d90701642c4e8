"""The names of the attention backends: apart from their code, so that a command line can check them without importing torch."""

from __future__ import annotations

ATTENTION_BACKENDS = {
    "torch": "plain torch operations, on every device that torch knows",
    "cpu": "compiled for the processor at hand: reads each block once, in place",
    "triton": "the Triton kernels, on a GPU",
    "triton-interpret": "the same kernels, number by number, on any machine: slow, for learning and testing",
    "batch_invariant": "a fixed order of arithmetic for each token, whatever else is in the batch",
    "reference": "the oracle: slow, for tests and for doubt",
}
"""Name -> what it is."""


def is_triton(name: str, device: str) -> bool:
    """Does this backend mean Triton kernels, for norms, activations and sampling too?"""
    return resolve_backend(name, device) in ("triton", "triton-interpret")


def resolve_backend(name: str, device: str = "cpu") -> str:
    """One of the names, or a user's `module:function`; "auto" becomes the fastest for the device (cpu or cuda).

    Raises ValueError, with the known names, for an unknown one.
    """
    if name == "auto":
        return "triton" if device == "cuda" else "torch"
    if name not in ATTENTION_BACKENDS and ":" not in name:
        known = ", ".join(ATTENTION_BACKENDS)
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {known}, or module:function of your own")
    return name
