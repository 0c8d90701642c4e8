"""Kernels and tiles with the mistakes that `python -m stage04_kernels compile` is there to find: prints what it says of each, as JSON; beside
them what it says of two without a mistake, and the kernels that the language refuses if integers are 1.

A program, not a module: where the tests run, Triton interprets.
"""

from __future__ import annotations

import json
from dataclasses import replace

import triton
import triton.language as tl

from stage04_kernels.lab.compile import (
    CHIPS,
    Variant,
    attention_variants,
    compile_source,
    compile_variant,
    hold_to_budget,
    variants,
)


@triton.jit
def _add(x_ptr, count):
    tl.store(x_ptr, tl.load(x_ptr) + count.to(tl.float32))


def problems(variant: Variant) -> str:
    """What is said of it, in one line."""
    chip = CHIPS["sm_90"]
    return "; ".join(hold_to_budget(compile_variant(variant, chip), variant, chip).problems)


real = {(variant.name, variant.dtype): variant for dtype in ("bf16", "f32") for variant in attention_variants(dtype)}
prompt, decode = real["paged_attention prefill 128", "bf16"], real["paged_attention decode 64", "bf16"]
exact = real["paged_attention prefill 64", "f32"]
found = {
    "constant": problems(Variant("add", _add, {}, {"x_ptr": "f32"})),
    "twice": problems(replace(prompt, constants=prompt.constants | {"BLOCK_M": 64})),
    "stages": problems(replace(decode, num_stages=2)),
    "float32": problems(replace(exact, num_warps=2)),
    "right": problems(prompt) + problems(decode),
    "refused": [
        each.name for each in variants() if compile_source(each, CHIPS["sm_90"], "ones", to_the_end=False).error
    ],
}
print(json.dumps(found))
