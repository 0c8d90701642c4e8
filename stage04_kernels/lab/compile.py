"""`python -m stage04_kernels compile`: every Triton kernel for chips that need not be present, and the resources it takes.

A compiler needs no GPU. Given the chip, it reports registers, spills and shared memory: these decide how many programs a
multiprocessor runs at once, and a test can hold them to a budget. vLLM has no counterpart.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stage04_kernels.triton_kernels import kv_write, layers, logprobs, paged_attention, sampler
from stage04_kernels.triton_kernels.tiles import NARROW

POINTERS = {"f32": "*fp32", "bf16": "*bf16", "i32": "*i32", "i64": "*i64", "i8": "*i8"}


@dataclass(frozen=True)
class Chip:
    """A chip to compile for, and its limits per program."""

    name: str
    target: GPUTarget
    shared_bytes: int


CHIPS = {
    "sm_80": Chip("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024),  # A100
    "sm_90": Chip("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),  # H100, H200
    "gfx942": Chip("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),  # MI300
}
"""Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD CDNA 3 ISA, local data share."""


@dataclass(frozen=True)
class Variant:
    """One kernel with one choice of its constants. `types` names the pointers' element types; every other argument is an int32
    unless `floats` names it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    floats: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3


@dataclass
class Resources:
    """What one variant takes on one chip. -1: the chip's tools did not say."""

    variant: str
    chip: str
    registers: int = -1  # per thread
    spilled_bytes: int = -1  # per thread, stores and loads
    shared_bytes: int = -1  # per program
    wide_loads: int = -1  # instructions that load 128 bits per thread
    matrix_ops: int = -1
    error: str = ""
    problems: list[str] = field(default_factory=list)


def _attention_variant(
    name: str, head_dim: int, group: int, max_query_len: int, num_splits: int = 1, has_window: bool = False
) -> Variant:
    block_m = NARROW.rows(group, max_query_len)
    constants = {
        "HEAD_DIM": head_dim, "PADDED_DIM": max(16, head_dim), "BLOCK_SIZE": 16, "GROUP": group, "BLOCK_M": block_m,
        "BLOCK_N": NARROW.keys(head_dim), "NUM_SPLITS": num_splits, "HAS_WINDOW": has_window, "UPCAST": False,
    }  # fmt: skip
    types = dict.fromkeys(
        ("block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "tile_request_ptr", "tile_first_ptr"), "i32"
    )
    types |= {"lse_ptr": "f32", "query_ptr": "bf16", "key_ptr": "bf16", "value_ptr": "bf16"}
    types["out_ptr"] = "f32" if num_splits > 1 else "bf16"
    return Variant(
        f"paged_attention {name}", paged_attention._paged_attention, constants, types,
        ("scale",), NARROW.warps(block_m, head_dim), NARROW.num_stages,
    )  # fmt: skip


def attention_variants() -> Iterator[Variant]:
    """Decodes and prefills of the head sizes that models have."""
    for head_dim in (64, 128, 256):
        yield _attention_variant(f"decode {head_dim}", head_dim, 1, 1)
        yield _attention_variant(f"prefill {head_dim}", head_dim, 1, 512)
    yield _attention_variant("decode 128, 4 heads share", 128, 4, 1)
    yield _attention_variant("split decode 128, 4 heads share", 128, 4, 1, num_splits=16)
    yield _attention_variant("prefill 128, window", 128, 4, 512, has_window=True)
    constants = {"HEAD_DIM": 128, "PADDED_DIM": 128, "NUM_SPLITS": 16}
    types = {"out_ptr": "bf16", "part_ptr": "f32", "part_lse_ptr": "f32"}
    yield Variant("reduce_splits", paged_attention._reduce_splits, constants, types, num_warps=1)


def other_variants() -> Iterator[Variant]:
    """Everything but attention, for shapes of GPT-2 and Llama 3 8B."""
    bf16 = dict.fromkeys(("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), "bf16") | {
        "slot_mapping_ptr": "i64"
    }
    yield Variant("write_kv", kv_write._write_kv, {"ROW": 1024, "PADDED_ROW": 1024}, bf16)
    heads = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": 128,
        "PADDED_HEADS": 32,
        "PADDED_KV_HEADS": 8,
        "PADDED_DIM": 128,
    }
    rope = bf16 | {"query_ptr": "bf16", "turned_query_ptr": "bf16", "cos_ptr": "f32", "sin_ptr": "f32"}
    yield Variant("rope_and_write_kv", kv_write._rope_and_write_kv, heads, rope, num_warps=8)
    for name, centre, size in (("rms_norm + residual", False, 4096), ("layer_norm + residual", True, 768)):
        constants = {"SIZE": size, "PADDED_SIZE": 1 << (size - 1).bit_length(), "HAS_RESIDUAL": True, "CENTRE": centre}
        types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "bf16")
        yield Variant(name, layers._norm, constants, types, ("eps",), num_warps=max(1, constants["PADDED_SIZE"] // 512))
    yield Variant("gelu", layers._gelu, {"TILE": 1024}, {"x_ptr": "bf16", "out_ptr": "bf16"})
    gate = {"gate_ptr": "bf16", "up_ptr": "bf16", "out_ptr": "bf16"}
    yield Variant("silu_and_mul", layers._silu_and_mul, {"TILE": 1024}, gate)
    tiles = {"TILE": 2048, "SEARCH_TILE": 1024}
    types = {
        "token_ptr": "i64", "top_k_ptr": "i64", "seed_ptr": "i64", "position_ptr": "i64", "penalty_row_ptr": "i64",
        "in_prompt_ptr": "i8",
    } | dict.fromkeys(("logits_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "counts_ptr", "repetition_ptr",
                       "frequency_ptr", "presence_ptr"), "f32")  # fmt: skip
    for name, on in (("sample", False), ("sample, all transforms", True)):
        flags = dict.fromkeys(("HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P", "HAS_PENALTIES"), on)
        yield Variant(name, sampler._sample, flags | tiles, types, num_warps=8)
    types = dict.fromkeys(("logits_ptr", "chosen_ptr", "best_ptr"), "f32")
    types |= dict.fromkeys(("token_ptr", "rank_ptr", "best_token_ptr"), "i64")
    yield Variant("logprobs, 20 best", logprobs._logprobs, {"COUNT": 32} | tiles, types, num_warps=8)


def compile_variant(variant: Variant, chip: Chip) -> Resources:
    """Compile one variant for one chip. If the compiler refuses it, `error` says why."""
    names = variant.kernel.arg_names
    signature = {
        name: "constexpr" if name in variant.constants
        else POINTERS[variant.types[name]] if name in variant.types
        else "fp32" if name in variant.floats else "i32"
        for name in names
    }  # fmt: skip
    # What Triton finds out at a launch: torch's memory, and the strides of these shapes, are multiples of 16.
    aligned = [
        i for i, name in enumerate(names) if name in variant.types or name.startswith(("stride", "num_elements"))
    ]
    source = ASTSource(variant.kernel, signature, variant.constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    result = Resources(variant.name, chip.name)
    try:
        compiled = triton.compile(source, target=chip.target, options=options)
    except Exception as error:  # the compiler's own exceptions have no common base
        result.error = f"{type(error).__name__}: {error}".splitlines()[0]
        return result
    result.shared_bytes = compiled.metadata.shared
    if chip.target.backend == "cuda":
        _read_ptx(compiled.asm["ptx"], chip, result)
    else:
        _read_gcn(compiled.asm["amdgcn"], result)
    return result


def _read_ptx(ptx: str, chip: Chip, result: Resources) -> None:
    """Ask NVIDIA's assembler, which comes with Triton, for registers and spills."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        architecture = re.search(r"^\.target (\S+)", ptx, re.M)
        arch = architecture[1].rstrip(",") if architecture else chip.name
        command = [str(ptxas), "-v", f"--gpu-name={arch}", str(source), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True).stderr
    if (registers := re.search(r"Used (\d+) registers", said)) is not None:
        result.registers = int(registers[1])
        result.spilled_bytes = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    wide = r"ld\.global[\w.:]*\.v4\.b32|ld\.global[\w.:]*\.v2\.b64|cp\.async\.c[ag]\.shared\.global [^;]*, 0x10"
    result.wide_loads = len(re.findall(wide, ptx))
    result.matrix_ops = len(re.findall(r"^\s*(?:@\S+ )?(?:mma\.sync|wgmma\.mma_async)", ptx, re.M))


def _read_gcn(assembly: str, result: Resources) -> None:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        return int(found[1]) if found else -1

    result.registers, result.spilled_bytes = number("vgpr_count"), 4 * number("vgpr_spill_count")
    result.wide_loads = len(re.findall(r"(?:buffer|global)_load_dwordx4", assembly))
    result.matrix_ops = len(re.findall(r"v_mfma", assembly))


def hold_to_budget(resources: Resources, variant: Variant, chip: Chip) -> Resources:
    """Note what breaks the rules: no spills, shared memory within the chip's limit, keys and values in wide loads, matrix instructions where
    there are products."""
    problems = resources.problems
    if resources.error:
        problems.append(resources.error)
        return resources
    if resources.spilled_bytes > 0:
        problems.append(f"spills {resources.spilled_bytes} bytes")
    if resources.shared_bytes > chip.shared_bytes:
        problems.append(f"shared memory above {chip.shared_bytes}")
    if variant.name.startswith("paged_attention"):
        if resources.wide_loads == 0:
            problems.append("no 128-bit load")
        if resources.matrix_ops == 0:
            problems.append("no matrix instruction")
    return resources


def run_compile(chips: list[str]) -> Iterator[Resources]:
    """All variants on the named chips; gfx942 is best effort and never breaks a budget."""
    for name in chips:
        chip = CHIPS[name]
        for variant in (*attention_variants(), *other_variants()):
            yield hold_to_budget(compile_variant(variant, chip), variant, chip)
