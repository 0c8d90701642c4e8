"""The shapes of the GPT-2 family: with a known shape, `--load-format dummy` needs no files at all."""

from __future__ import annotations

from stage03_engine.model_path import WeightFormat
from stage03_engine.model_shape import ModelShape


class Dummy(WeightFormat):
    """Random weights of any known shape."""

    needs_files = False
    tensors = "stage03_engine.core.features.dummy_weights.dummy_weights:dummy_tensors"


DUMMY = Dummy()


def _gpt2(num_layers: int, num_heads: int, hidden_size: int) -> ModelShape:
    return ModelShape(
        "GPT2LMHeadModel", 50257, num_layers, num_heads, num_heads, hidden_size // num_heads, hidden_size,
        4 * hidden_size, 1024, eos_token_id=50256,
    )  # fmt: skip


_GPT2 = {
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
}
KNOWN_SHAPES = _GPT2 | {f"openai-community/{name}": shape for name, shape in _GPT2.items()}
"""Shapes that `--load-format dummy` knows without files: table 2 of the GPT-2 paper (Radford et al. 2019)."""
