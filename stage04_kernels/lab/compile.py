"""`python -m stage04_kernels compile`: every Triton kernel for chips that need not be present, and the resources it takes.

A compiler needs no GPU. Given the chip, it reports registers, spills and shared memory: these decide how many programs a
multiprocessor runs at once, and a test can hold them to a budget. vLLM has no counterpart.

A launch compiles for its arguments: an integer that equals 1 becomes a constant, one that 16 divides is known to be so, and a pointer
too. Each kernel is compiled as our launches call it. With integers at 1 it is only translated to Triton's own form (TTIR), which shows
what the language refuses; `--full` compiles that to the end, and unaligned arguments too.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from stage04_kernels.features.cascade_attention import triton_kernels as cascade
from stage04_kernels.features.kv_cache_8bit import triton_kernels as codes
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS
from stage04_kernels.triton_kernels import (
    byte_linear,
    int4_linear,
    kv_write,
    layers,
    logprobs,
    lora,
    one_head,
    paged_attention,
    sampler,
)
from stage04_kernels.triton_kernels.tiles import NARROW

POINTERS = {"f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "i32": "*i32", "i64": "*i64", "i8": "*i8", "u8": "*u8"}
MIN_KV_BUFFERS = 2
"""Tiles of keys, and of values, in shared memory: one is read while the others are on their way."""


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
    """One kernel with one choice of its constants. `types` names the pointers' element types, "x" being the number format of the
    model; every other argument is an int32 unless `floats` names it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    floats: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    dtype: str = "bf16"

    @property
    def is_attention(self) -> bool:
        """Does it read the KV cache, and multiply?"""
        return self.name.startswith("paged_attention")

    def source(self, arguments: str) -> ASTSource:
        """What a launch with such arguments compiles: "aligned" (torch's memory, and the strides of these shapes, are multiples of
        16), "unaligned", or "ones" (every integer is 1)."""
        names = self.kernel.arg_names
        constants, signature, aligned = dict(self.constants), {}, []
        for index, (name, parameter) in enumerate(zip(names, self.kernel.params)):
            signature[name] = self._type(name)
            if signature[name] == "i32" and arguments == "ones" and not parameter.do_not_specialize:
                constants[name], signature[name] = 1, "constexpr"
            is_multiple = name in self.types or name.startswith(("stride", "num_elements"))
            if is_multiple and signature[name] != "constexpr" and arguments != "unaligned":
                aligned.append(index)
        return ASTSource(self.kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.types:
            return POINTERS[self.types[name].replace("x", self.dtype)]
        return "fp32" if name in self.floats else "i32"


@dataclass
class Resources:
    """What one variant takes on one chip. -1: the chip's tools did not say."""

    variant: str
    chip: str
    dtype: str = "bf16"
    registers: int = -1  # per thread
    spilled_bytes: int = -1  # per thread, stores and loads
    shared_bytes: int = -1  # per program
    kv_buffers: int = -1  # tiles of keys, and of values, in shared memory
    repeats: int = 1  # how often the warps of a program compute one number of a product
    wide_loads: int = -1  # instructions that load 128 bits per thread
    matrix_ops: int = -1
    with_ones: str = "ok"  # or what is wrong when the integers are 1
    error: str = ""
    problems: list[str] = field(default_factory=list)


def _attention_variant(
    name: str, head_dim: int, group: int, max_query_len: int, num_splits: int = 1, has_window: bool = False,
    dtype: str = "bf16",
) -> Variant:  # fmt: skip
    tile = NARROW.tile(group, max_query_len, head_dim, 4 if dtype == "f32" else 2, has_window)
    constants = {
        "HEAD_DIM": head_dim, "PADDED_DIM": max(16, head_dim), "BLOCK_SIZE": 16, "GROUP": group, "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys, "NUM_SPLITS": num_splits, "HAS_WINDOW": has_window, "UPCAST": False,
    }  # fmt: skip
    types = dict.fromkeys(
        ("block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "tile_request_ptr", "tile_first_ptr"), "i32"
    )
    types |= {"lse_ptr": "f32", "query_ptr": "x", "key_ptr": "x", "value_ptr": "x"}
    types["out_ptr"] = "f32" if num_splits > 1 else "x"
    return Variant(
        f"paged_attention {name}", paged_attention._paged_attention, constants, types,
        ("scale",), tile.num_warps, NARROW.num_stages, dtype,
    )  # fmt: skip


def attention_variants(dtype: str = "bf16") -> Iterator[Variant]:
    """Decodes and prefills of the head sizes that models have, in one number format."""
    for head_dim in (64, 128, 256):
        yield _attention_variant(f"decode {head_dim}", head_dim, 1, 1, dtype=dtype)
        yield _attention_variant(f"prefill {head_dim}", head_dim, 1, 512, dtype=dtype)
    yield _attention_variant("prefill 64, window", 64, 4, 512, has_window=True, dtype=dtype)
    yield _attention_variant("prefill 128, window", 128, 4, 512, has_window=True, dtype=dtype)
    yield _attention_variant("decode 128, 4 heads share", 128, 4, 1, dtype=dtype)
    yield _attention_variant("split decode 128, 4 heads share", 128, 4, 1, num_splits=16, dtype=dtype)
    types = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "out_ptr"), "x") | {"block_table_ptr": "i32"}
    sizes = {"DIM": 64, "ROWS": 16, "KEYS": 16}
    yield Variant("one head 64, the explanation", one_head._one_head, sizes, types, ("scale",), dtype=dtype)
    constants = {"HEAD_DIM": 128, "PADDED_DIM": 128, "NUM_SPLITS": 16}
    types = {"out_ptr": "x", "part_ptr": "f32", "part_lse_ptr": "f32"}
    yield Variant("reduce_splits", paged_attention._reduce_splits, constants, types, num_warps=1, dtype=dtype)


def cascade_variants(dtype: str = "bf16") -> Iterator[Variant]:
    """What requests share: few rows and many, of the head sizes that models have, and the merge."""
    tiles = dict.fromkeys(("prefix_table_ptr", "prefix_lens_ptr", "rows_ptr"), "i32")
    tiles |= dict.fromkeys(("tile_prefix_ptr", "tile_first_ptr", "tile_end_ptr"), "i32")
    for rows, head_dim, group in ((8, 64, 1), (256, 64, 1), (256, 128, 4), (8, 256, 1), (256, 256, 1)):
        plain = _attention_variant("", head_dim, group, rows, num_splits=4, dtype=dtype)
        tile = cascade.prefix_tile(NARROW, group, rows, head_dim, 4 if dtype == "f32" else 2)
        constants = {name: value for name, value in plain.constants.items() if name != "HAS_WINDOW"}
        constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
        types = {name: plain.types[name] for name in ("lse_ptr", "query_ptr", "key_ptr", "value_ptr")}
        yield replace(
            plain, name=f"paged_attention shared prefix {head_dim}, {rows} rows x {group}", kernel=cascade._attend_shared_prefix,
            constants=constants, types=types | tiles | {"part_ptr": "f32"}, num_warps=tile.num_warps,
        )  # fmt: skip
    constants = {"HEAD_DIM": 128, "PADDED_DIM": 128, "PREFIX_SPLITS": 4, "OWN_SPLITS": 2}
    types = {"out_ptr": "x"} | dict.fromkeys(("prefix_ptr", "prefix_lse_ptr", "own_ptr", "own_lse_ptr"), "f32")
    yield Variant("merge_parts", cascade._merge_parts, constants, types, num_warps=1, dtype=dtype)


def code_variants(dtype: str = "bf16") -> Iterator[Variant]:
    """The KV cache of 8 bits: decodes and prefills over the two kinds of code, with scales and without, and the write."""
    memory = dict.fromkeys(("key_ptr", "value_ptr"), "u8")
    for name in ("int8_per_token_head", "fp8_e4m3"):
        kv_format = FORMATS[name]
        format_ = {"MANTISSA": codes.MANTISSA[kv_format.dtype], "HAS_SCALES": kv_format.has_scales}
        scales = dict.fromkeys(("key_scale_ptr", "value_scale_ptr"), "f32" if kv_format.has_scales else "u8")
        for what, head_dim, group, max_query_len in (
            ("decode", 64, 1, 1), ("prefill", 64, 1, 512), ("decode", 128, 4, 1), ("prefill", 128, 4, 512),
        ):  # fmt: skip
            plain = _attention_variant("", head_dim, group, max_query_len, dtype=dtype)
            tile = NARROW.tile(group, max_query_len, head_dim, 4 if dtype == "f32" else 2, False)
            block = {
                "BLOCK_N": codes.num_keys(tile, 4 if dtype == "f32" else 2, head_dim),
                "NUM_KV_HEADS": 8,
                "BLOCK_BYTES": 16 * 8 * kv_format.head_bytes(head_dim),
            }
            yield replace(
                plain, name=f"paged_attention {what} {head_dim}, {name}", kernel=codes._paged_attention_8bit,
                constants=plain.constants | block | format_, types=plain.types | memory | scales,
            )  # fmt: skip
        write: dict[str, Any] = {
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": 128,
            "PADDED_KV_HEADS": 8,
            "PADDED_DIM": 128,
            "BLOCK_SIZE": 16,
        }
        write |= {"BLOCK_BYTES": 16 * 8 * kv_format.head_bytes(128), "LARGEST": kv_format.largest, **format_}
        types = {"key_ptr": "x", "value_ptr": "x", "slot_mapping_ptr": "i64"} | scales
        types |= dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), "u8")
        yield Variant(f"write_kv, {name}", codes._write_kv_8bit, write, types, dtype=dtype)


def other_variants(dtype: str = "bf16") -> Iterator[Variant]:
    """Everything else that works in the model's number format, for shapes of GPT-2 and Llama 3 8B."""
    cache = dict.fromkeys(("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), "x") | {
        "slot_mapping_ptr": "i64"
    }
    yield Variant("write_kv", kv_write._write_kv, {"ROW": 1024, "PADDED_ROW": 1024}, cache, dtype=dtype)
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "PADDED_HEADS": 32, "PADDED_KV_HEADS": 8, "PADDED_DIM": 128}  # fmt: skip
    rope = cache | {"query_ptr": "x", "turned_query_ptr": "x", "cos_ptr": "f32", "sin_ptr": "f32"}
    yield Variant("rope_and_write_kv", kv_write._rope_and_write_kv, heads, rope, num_warps=8, dtype=dtype)
    for name, centre, size in (("rms_norm", False, 4096), ("layer_norm", True, 768)):
        for has_residual in (True, False):
            yield _norm_variant(name, centre, size, has_residual, dtype)
    yield Variant("gelu", layers._gelu, {"TILE": 1024}, {"x_ptr": "x", "out_ptr": "x"}, dtype=dtype)
    gate = {"gate_ptr": "x", "up_ptr": "x", "out_ptr": "x"}
    yield Variant("silu_and_mul", layers._silu_and_mul, {"TILE": 1024}, gate, dtype=dtype)
    yield from _low_rank_variants(dtype)
    yield from _int4_variants(dtype)
    yield from _byte_variants(dtype)


def _int4_variants(dtype: str) -> Iterator[Variant]:
    """A matrix of Llama 3 8B in groups of 128, and of GPT-2 in groups of 24, for a decode and for a prompt."""
    types = {"x_ptr": "x", "code_ptr": "u8", "scale_ptr": "f32", "zero_ptr": "u8", "bias_ptr": "x", "y_ptr": "x"}
    for inputs, outputs, group in ((4096, 4096, 128), (768, 3072, 24)):
        block, one_group = int4_linear.block_of(group)
        own = {
            "IN": inputs,
            "OUT": outputs,
            "GROUP": group,
            "ONE_GROUP": one_group,
            "HAS_BIAS": True,
            "BLOCK_K": block,
            "UPCAST": False,
        }
        for rows in (int4_linear.FEW_ROWS,) if dtype == "f32" else int4_linear.OUTPUTS:
            constants = own | {"BLOCK_M": rows, "BLOCK_N": int4_linear.OUTPUTS[rows]}
            yield Variant(
                f"int4 linear {rows} rows, groups of {group}", int4_linear._int4_linear, constants, types, dtype=dtype
            )


def _byte_variants(dtype: str) -> Iterator[Variant]:
    """A matrix of Llama 3 8B in int8 and in fp8, for a decode and for a prompt."""
    types = {"x_ptr": "x", "code_ptr": "u8", "scale_ptr": "f32", "bias_ptr": "x", "y_ptr": "x"}
    own = {"IN": 4096, "OUT": 4096, "HAS_BIAS": True, "BLOCK_K": byte_linear.BLOCK_K, "UPCAST": False}
    for name, fp8 in (("int8", False), ("fp8", True)):
        for rows in (byte_linear.FEW_ROWS,) if dtype == "f32" else byte_linear.OUTPUTS:
            constants = own | {"FP8": fp8, "BLOCK_M": rows, "BLOCK_N": byte_linear.OUTPUTS[rows]}
            yield Variant(f"{name} linear {rows} rows", byte_linear._byte_linear, constants, types, dtype=dtype)


def _low_rank_variants(dtype: str) -> Iterator[Variant]:
    """Pairs of rank 16 and 64 beside a matrix of Llama 3 8B."""
    tiles = {"tile_place_ptr": "i32", "tile_rows_ptr": "i32", "hidden_ptr": "f32"}
    for rank in (16, 64):
        own = {"RANK": rank, "PADDED_RANK": rank, "ROWS": 16, "NUM_SPLITS": 8, "UPCAST": False}
        shrink = own | {"IN": 4096, "BLOCK_K": lora.block_of(rank)}
        expand = own | {"OUT": 4096, "BLOCK_N": lora.block_of(rank)}
        yield Variant(f"lora shrink {rank}", lora._shrink, shrink, tiles | {"x_ptr": "x", "a_ptr": "x"}, dtype=dtype)
        yield Variant(f"lora expand {rank}", lora._expand, expand, tiles | {"y_ptr": "x", "b_ptr": "x"}, dtype=dtype)


def _norm_variant(name: str, centre: bool, size: int, has_residual: bool, dtype: str) -> Variant:
    """A pointer that a launch leaves out is the constant None."""
    padded = 1 << (size - 1).bit_length()
    constants: dict[str, Any] = {"SIZE": size, "PADDED_SIZE": padded, "HAS_RESIDUAL": has_residual, "CENTRE": centre}
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "x")
    for pointer, is_there in (("residual_ptr", has_residual), ("bias_ptr", centre)):
        if not is_there:
            constants[pointer] = None
            del types[pointer]
    name += " + residual" if has_residual else ""
    return Variant(name, layers._norm, constants, types, ("eps",), max(1, padded // 512), dtype=dtype)


def sampler_variants() -> Iterator[Variant]:
    """The sampler and the log-probabilities: logits are float32 always."""
    tiles = {"TILE": 2048, "SEARCH_TILE": 1024}
    always = {
        "token_ptr": "i64",
        "logits_ptr": "f32",
        "temperature_ptr": "f32",
        "seed_ptr": "i64",
        "position_ptr": "i64",
    }
    optional = {
        "top_k_ptr": "i64",
        "top_p_ptr": "f32",
        "min_p_ptr": "f32",
        "penalty_row_ptr": "i64",
        "in_prompt_ptr": "i8",
    }
    optional |= dict.fromkeys(("counts_ptr", "repetition_ptr", "frequency_ptr", "presence_ptr"), "f32")
    flags = ("HAS_FILTERS", "HAS_PENALTIES")
    plain = dict.fromkeys(flags, False) | dict.fromkeys(optional) | tiles
    yield Variant("sample", sampler._sample, plain, always, num_warps=8, dtype="f32")
    filters = {name: optional[name] for name in ("top_k_ptr", "top_p_ptr", "min_p_ptr")}
    in_a_graph = dict.fromkeys(optional.keys() - filters.keys()) | {"HAS_FILTERS": True, "HAS_PENALTIES": False} | tiles
    yield Variant("sample, in a graph", sampler._sample, in_a_graph, always | filters, num_warps=8, dtype="f32")
    everything = dict.fromkeys(flags, True) | tiles
    yield Variant("sample, all transforms", sampler._sample, everything, always | optional, num_warps=8, dtype="f32")
    types = dict.fromkeys(("logits_ptr", "chosen_ptr", "best_ptr"), "f32")
    types |= dict.fromkeys(("token_ptr", "rank_ptr", "best_token_ptr"), "i64")
    for name, has_best in (("logprobs of the sampled", False), ("logprobs of the best too", True)):
        yield Variant(name, logprobs._logprobs, {"HAS_BEST": has_best} | tiles, types, num_warps=8, dtype="f32")


def variants(full: bool = False) -> Iterator[Variant]:
    """What `compile` compiles: the model's kernels in bfloat16, the plainest of attention also in float32, the sampler; `full`: every
    kernel in all three formats, but those of an 8-bit cache, which are held to no budget in float32."""
    for dtype in ("bf16", "f32", "f16") if full else ("bf16", "f32"):
        found = [*attention_variants(dtype), *other_variants(dtype)]
        yield from found if full or dtype == "bf16" else found[:6]  # decodes and prefills
        if full or dtype == "bf16":
            yield from cascade_variants(dtype)
        if dtype != "f32":  # with heads of 128 their prefills spill: slow there, and right
            yield from code_variants(dtype)
    yield from sampler_variants()


def compile_variant(variant: Variant, chip: Chip, full: bool = False) -> Resources:
    """Compile one variant for one chip; what the compiler refuses becomes `error`, for other arguments a problem."""
    result = compile_source(variant, chip, "aligned", to_the_end=True)
    for arguments, said in (("ones", "integers at 1"), ("unaligned", "unaligned"))[: 2 if full else 1]:
        other = compile_source(variant, chip, arguments, to_the_end=full)
        spills = other.spilled_bytes > 0 and arguments == "ones"  # without wide loads there is no budget
        found = other.error or (f"spills {other.spilled_bytes} bytes" if spills else "")
        if found:
            result.problems.append(f"{said}: {found}")
            result.with_ones = "no" if arguments == "ones" else result.with_ones
    return result


# Invariant: the stages are those of triton.compile, one by one, so that the last one, the assembler, is run once and its words are kept.
def compile_source(variant: Variant, chip: Chip, arguments: str, to_the_end: bool) -> Resources:
    """Compile for one kind of arguments (`Variant.source`): to machine code, or only to TTIR. If the compiler refuses, `error` says why."""
    result = Resources(variant.name, chip.name, variant.dtype)
    backend = make_backend(chip.target)
    options = backend.parse_options({"num_warps": variant.num_warps, "num_stages": variant.num_stages})
    stages: dict[str, Any] = {}
    context, metadata = ir.context(), {"target": chip.target, **vars(options)}
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source = variant.source(arguments)
        backend.add_stages(stages, options, source.language)
        code_generators, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module: Any = source.make_ir(chip.target, options, code_generators, modules, context)
        for name in ("ttir", "ttgir", "llir", "ptx" if chip.target.backend == "cuda" else "amdgcn")[
            : 4 if to_the_end else 1
        ]:
            module = stages[name](module, metadata)
            if name == "ttgir":
                read_ttgir(str(module), variant, result)
    except Exception as error:  # the compiler's own exceptions have no common base
        result.error = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
        return result
    if to_the_end:
        result.shared_bytes = metadata["shared"]
        (_read_ptx if chip.target.backend == "cuda" else _read_gcn)(module, chip, result)
    return result


def read_ttgir(ttgir: str, variant: Variant, result: Resources) -> None:
    """How many tiles of keys are in shared memory, and whether warps repeat each other's products."""
    if not variant.is_attention or CHIPS[result.chip].target.backend != "cuda":
        return
    keys, dim = variant.constants["BLOCK_N"], variant.constants["PADDED_DIM"]
    buffers = re.findall(rf"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x{keys}x{dim}x", ttgir)
    result.kv_buffers = min(map(int, buffers), default=0)
    layouts = dict(re.findall(r"#(mma\d*) = #ttg\.nvidia_mma<\{(.*)\}>", ttgir))
    # `%scores = tt.dot ... -> tensor<128x64xf32, #mma>`: rows, columns and layout of a product
    for rows, columns, layout in re.findall(
        r"(?:tt\.dot|warp_group_dot) .*-> tensor<(\d+)x(\d+)xf32, #(mma\d*)>", ttgir
    ):
        warps = re.search(r"warpsPerCTA = \[(\d+), (\d+)\]", layouts[layout])
        assert warps is not None
        # a warp's product has 16 x 8 numbers or more
        down, across = 16 * int(warps[1]) / int(rows), 8 * int(warps[2]) / int(columns)
        result.repeats = max(result.repeats, round(max(1, down) * max(1, across)))


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


def _read_gcn(assembly: str, chip: Chip, result: Resources) -> None:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        return int(found[1]) if found else -1

    result.registers, result.spilled_bytes = number("vgpr_count"), 4 * number("vgpr_spill_count")
    result.wide_loads = len(re.findall(r"(?:buffer|global)_load_dwordx4", assembly))
    result.matrix_ops = len(re.findall(r"v_mfma", assembly))


def hold_to_budget(resources: Resources, variant: Variant, chip: Chip) -> Resources:
    """Note what breaks the rules: no spills and shared memory within the chip's limit; in attention wide loads, two tiles of keys or more in
    flight, and matrix instructions that compute each number once."""
    problems = resources.problems
    if resources.error:
        problems.append(resources.error)
        return resources
    if resources.spilled_bytes > 0:
        problems.append(f"spills {resources.spilled_bytes} bytes")
    if resources.shared_bytes > chip.shared_bytes:
        problems.append(f"shared memory above {chip.shared_bytes}")
    if variant.is_attention:
        if resources.wide_loads == 0:
            problems.append("no 128-bit load")
        if resources.matrix_ops == 0 and variant.dtype != "f32":  # a matrix unit would round exact float32
            problems.append("no matrix instruction")
        if 0 <= resources.kv_buffers < MIN_KV_BUFFERS:
            problems.append(f"{resources.kv_buffers} tile of keys in flight")
        if resources.repeats > 1:
            problems.append(f"products computed {resources.repeats} times")
    return resources


def run_compile(chips: list[str], full: bool = False) -> Iterator[Resources]:
    """All variants on the named chips; gfx942 is best effort and never breaks a budget."""
    for name in chips:
        chip = CHIPS[name]
        for variant in variants(full):
            yield hold_to_budget(compile_variant(variant, chip, full), variant, chip)
