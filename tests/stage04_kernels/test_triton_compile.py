"""Compiling for chips that need not be present: the real kernels keep their budgets, and what breaks one is reported."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from patience import PATIENCE

from stage04_kernels.lab.compile import CHIPS, Resources, attention_variants, hold_to_budget, variants

HERE = Path(__file__).parent
DECODE = next(iter(attention_variants()))
GOOD = Resources(DECODE.name, "sm_90", "bf16", 80, 0, 20_000, kv_buffers=2, wide_loads=4, matrix_ops=8)


def compiling(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: here the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE, env=environment)


def all_keep_their_budgets(chip: str, *flags: str) -> None:
    """On a machine that has nothing but torch, Triton and numpy."""
    done = compiling(str(HERE / "bare_machine.py"), "compile", "--chip", chip, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *rows, summary = done.stdout.splitlines()
    assert all(title in header for title in ("registers", "spills", "K/V buffers", "dtype", "int = 1"))
    assert summary == "0 over budget"
    assert len(rows) == len([*variants("--full" in flags)])
    assert all(row.startswith(chip) and row.endswith("ok  ok") for row in rows)


@pytest.mark.slow
def test_all_kernels_keep_their_budgets() -> None:
    all_keep_their_budgets("sm_90")


@pytest.mark.long
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_all_kernels_in_every_form_keep_their_budgets(chip: str) -> None:
    """Every number format, integers at 1, aligned and unaligned pointers, to the end."""
    all_keep_their_budgets(chip, "--full")


def test_what_once_went_wrong_is_noticed() -> None:
    """An integer that becomes a constant, a tile whose rows are computed twice, too few stages, float32 in tiles for 16 bit. And nothing else."""
    done = compiling(str(HERE / "planted_variants.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "integers at 1" in found["constant"] and "'to'" in found["constant"]
    assert found["twice"] == "products computed 2 times"
    assert found["stages"] == "1 tile of keys in flight"
    assert found["float32"].startswith("spills ")
    assert found["right"] == "" and found["refused"] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spilled_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": 300_000}, "shared memory above 232448"),
        ({"wide_loads": 0}, "no 128-bit load"),
        ({"matrix_ops": 0}, "no matrix instruction"),
        ({"kv_buffers": 1}, "1 tile of keys in flight"),
        ({"repeats": 2}, "products computed 2 times"),
        ({"error": "CompilationError: no"}, "CompilationError: no"),
    ],
)
def test_what_breaks_a_budget_is_said(change: dict[str, object], problem: str) -> None:
    assert hold_to_budget(replace(GOOD, problems=[]), DECODE, CHIPS["sm_90"]).problems == []
    assert hold_to_budget(replace(GOOD, problems=[], **change), DECODE, CHIPS["sm_90"]).problems == [problem]


def test_every_kernel_of_the_package_is_compiled() -> None:
    """A new kernel must be named in compile.py."""
    from stage04_kernels import triton_kernels
    from stage04_kernels.features.cascade_attention import triton_kernels as cascade
    from stage04_kernels.features.kv_cache_8bit import triton_kernels as codes

    names = {each.name for each in pkgutil.iter_modules(triton_kernels.__path__)} - {
        "interpreted"
    }  # which sets a variable
    modules = [importlib.import_module(f"{triton_kernels.__name__}.{name}") for name in sorted(names)]
    launched = {
        name
        for module in (codes, cascade, *modules)
        for name, value in vars(module).items()
        if type(value).__name__ in ("InterpretedFunction", "JITFunction") and value.fn.__module__ == module.__name__
    }
    helpers = {
        *(
            "_decode",
            "_encode",
            "_keys_of_program",
            "_load_blocks",
            "_load_keys_and_values",
            "_load_parts",
            "_scores",
            "_softmax_step",
            "_store_rows",
            "_turn",
            "_weights",
            "_widened",
            "_tanh",
            "_write_heads",
        ),
        *("_ordered", "_unordered", "_load_logits", "_find_threshold", "_after_top_p", "_gumbel", "_keep", "_draw"),
    }
    assert {variant.kernel.__name__ for variant in variants()} == launched - helpers
