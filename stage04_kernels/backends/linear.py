"""Linear layers by name (vLLM: the kernels behind UnquantizedLinearMethod; its CPU backend packs for oneDNN too).

A backend takes a weight once, when a model is loaded, and returns the function that multiplies by it. Which one is fastest depends
on the processor, the number format and the number of rows: so `fastest` measures. This file imports no torch, so that a
command line can check names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from stage04_kernels.attention import load

if TYPE_CHECKING:
    from torch import Tensor

Product = Callable[["Tensor"], "Tensor"]
"""x [num_rows, in_features] -> [num_rows, out_features], in x's number format."""


class Pack(Protocol):
    """Makes a `Product` of the weights of a layer."""

    def __call__(self, weight: Tensor, bias: Tensor | None, activation: str | None, /) -> Product:
        """
        weight      [out_features, in_features], of any strides
        bias        [out_features] or None
        activation  None, or "gelu_tanh", which the product ends with
        """


BACKENDS = {
    # packed and multiplied by native.cpp
    "native": "stage04_kernels.backends.native.linear:NativeLinear",
    # packed and multiplied by oneDNN, which torch brings along
    "onednn": "stage04_kernels.backends.onednn_linear:OneDNNLinear",
    # plain torch, with the weights as they are
    "torch": "stage04_kernels.backends.torch_linear:TorchLinear",
}
FEW_ROWS = 8
"""Up to so many rows, reading the weights takes most of the time; beyond, multiplying does: the fastest is chosen for each."""
MEASURED_ROWS = (1, 64)
MARGIN = 0.9  # another backend than the first in the table must need less than this share of its time
SMALL = 1 << 20
"""With fewer weights than this in its largest layer a model is not measured: all are fast, and noise would decide."""


def int4_group(inputs: int) -> int:
    """How many inputs share a scale in int4 weights that are made here: the largest divisor that is not more than 128, so that all groups are
    of one size."""
    return next(size for size in range(min(128, inputs), 0, -1) if inputs % size == 0)


def linear_backend_problem(name: str) -> str | None:
    """Why this backend cannot be used on this machine; None if it can."""
    if name not in BACKENDS:
        known = f"unknown; known: auto, {', '.join(BACKENDS)}, or module:Class of your own"
        return None if name == "auto" or ":" in name else known
    try:
        found = find_spec(module := BACKENDS[name].partition(":")[0])
    except ModuleNotFoundError:  # not even its folder is there
        found = None
    if found is None:
        return f"not installed: {module} is missing"
    return load("stage04_kernels.backends.native.library:problem")() if name == "native" else None


def get_linear_backend(name: str) -> Pack:
    """The function of a backend that packs."""
    pack: Pack = load(BACKENDS.get(name, name))
    return pack


class ByRows:
    """A product for few rows, and another one for many."""

    def __init__(self, few: Product, many: Product) -> None:
        self.few, self.many = few, many

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if len(x) <= FEW_ROWS else self.many(x)


def candidates() -> list[str]:
    """The backends that this machine has, those first that are taken if nothing is measured."""
    return [name for name in BACKENDS if linear_backend_problem(name) is None]


def fastest(weight: Tensor, bias: Tensor | None, rounds: int = 5) -> tuple[str, str, str]:
    """(the fastest backend for few rows, the fastest for many, what was measured in words), for this weight on this machine."""
    products: dict[str, Product] = {}
    for name in candidates():
        try:
            products[name] = get_linear_backend(name)(weight, bias, None)
            products[name](weight.new_zeros(1, weight.shape[1]))
        except (RuntimeError, ValueError, AttributeError, NotImplementedError):
            products.pop(name, None)  # it does not know this format, or this torch does not have it
    first = next(iter(products), "torch")
    if weight.numel() < SMALL or not products:
        return first, first, "a small model is not measured"
    chosen, words = [], []
    for rows in MEASURED_ROWS:
        x = weight.new_ones(rows, weight.shape[1])
        times = {name: float("inf") for name in products}
        for _ in range(rounds):
            for name, product in products.items():
                start = time.perf_counter()
                product(x)
                times[name] = min(times[name], time.perf_counter() - start)
        best = min(times, key=lambda name: times[name])
        chosen.append(best if times[best] < MARGIN * times[first] else first)
        words.append(f"{rows} row{'s' * (rows > 1)}: " + ", ".join(f"{n} {t * 1e3:.2f} ms" for n, t in times.items()))
    return chosen[0], chosen[1], "; ".join(words)
