"""Kernels and tiles with the mistakes that `python -m stage04_kernels compile` is there to find: prints what it says of each, as JSON.

A program, not a module: where the tests run, Triton interprets.
"""

from __future__ import annotations

import json
from dataclasses import replace

import triton
import triton.language as tl

from stage04_kernels.lab.compile import CHIPS, Variant, attention_variants, compile_variant, hold_to_budget


@triton.jit
def _add(x_ptr, count):
    tl.store(x_ptr, tl.load(x_ptr) + count.to(tl.float32))


def problems(variant: Variant) -> str:
    """What is said of it, in one line."""
    chip = CHIPS["sm_90"]
    return "; ".join(hold_to_budget(compile_variant(variant, chip), variant, chip).problems)


real = {(variant.name, variant.dtype): variant for dtype in ("bf16", "f32") for variant in attention_variants(dtype)}
prompt = real["paged_attention prefill 128", "bf16"]
exact = real["paged_attention prefill 64", "f32"]
found = {
    "constant": problems(Variant("add", _add, {}, {"x_ptr": "f32"})),
    "twice": problems(replace(prompt, constants=prompt.constants | {"BLOCK_M": 64})),
    "stages": problems(replace(real["paged_attention decode 64", "bf16"], num_stages=2)),
    "float32": problems(replace(exact, num_warps=1)),
}
print(json.dumps(found))
