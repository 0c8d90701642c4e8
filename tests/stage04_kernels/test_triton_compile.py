"""Compiling for chips that need not be present: the real kernels keep their budgets, and what breaks one is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from patience import PATIENCE

from stage04_kernels.lab.compile import CHIPS, Resources, Variant, attention_variants, hold_to_budget, other_variants

DECODE = next(iter(attention_variants()))
GOOD = Resources(DECODE.name, "sm_90", registers=80, spilled_bytes=0, shared_bytes=20_000, wide_loads=4, matrix_ops=8)


def test_all_kernels_keep_their_budgets_on_both_chips() -> None:
    """In a process of its own: here the kernels are interpreted. Two chips, as the README's command does it for one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "stage04_kernels", "compile", "--chip", "sm_80", "--chip", "sm_90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *rows, summary = done.stdout.splitlines()
    assert "registers" in header and summary == "0 over budget"
    count = len([*attention_variants(), *other_variants()])
    assert [row.split()[0] for row in rows] == ["sm_80"] * count + ["sm_90"] * count
    assert all(row.endswith("ok") for row in rows)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spilled_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": 300_000}, "shared memory above 232448"),
        ({"wide_loads": 0}, "no 128-bit load"),
        ({"matrix_ops": 0}, "no matrix instruction"),
        ({"error": "CompilationError: no"}, "CompilationError: no"),
    ],
)
def test_what_breaks_a_budget_is_said(change: dict[str, object], problem: str) -> None:
    assert hold_to_budget(replace(GOOD, problems=[]), DECODE, CHIPS["sm_90"]).problems == []
    assert hold_to_budget(replace(GOOD, problems=[], **change), DECODE, CHIPS["sm_90"]).problems == [problem]


def test_every_kernel_of_the_package_is_compiled() -> None:
    """A new kernel must be named in compile.py."""
    from stage04_kernels.triton_kernels import kv_write, layers, logprobs, paged_attention, sampler

    launched = {
        name
        for module in (kv_write, layers, logprobs, paged_attention, sampler)
        for name, value in vars(module).items()
        if type(value).__name__ in ("InterpretedFunction", "JITFunction") and value.fn.__module__ == module.__name__
    }
    helpers = {
        *("_keys_of_program", "_load_keys_and_values", "_scores", "_softmax_step", "_store_rows", "_turn", "_tanh"),
        *("_ordered", "_unordered", "_load_logits", "_find_threshold", "_after_top_p", "_gumbel", "_keep", "_draw"),
    }
    variants: list[Variant] = [*attention_variants(), *other_variants()]
    assert {variant.kernel.__name__ for variant in variants} == launched - helpers
