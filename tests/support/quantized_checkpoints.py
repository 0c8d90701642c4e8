"""Writes quantized checkpoints, number by number, from the descriptions of the formats: it shares no code with what reads them.

`write` takes an ordinary checkpoint, and makes two of it: the quantized one, and its twin, whose plain weights are the numbers that the quantized one
stands for. No tool of the formats' makers is needed; `test_quantized_checkpoints.py` compares with compressed-tensors where that is installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.gpt2 import Conv1D
from stage03_engine.core.models.layers import Linear
from stage03_engine.model_path import BUNDLED_FOLDER

COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "linear_backend": "torch"}
CPU = torch.device("cpu")
Matrix = list[list[float]]
Whole = list[list[int]]


def lay_out(group: int, size: int) -> list[int]:
    """The group of each of `size` numbers in a row."""
    return [0 if group == -1 else at // group for at in range(size)]


def to_codes(matrix: Matrix, of: list[int], bits: int, symmetric: bool) -> tuple[Whole, Matrix, Whole]:
    """(codes, scales, zeros) of each row; a group runs from 0 to 2 ** bits - 1."""
    most, groups = 2**bits - 1, max(of) + 1
    codes, scales, zeros = [], [], []
    for row in matrix:
        its_scales, its_zeros = [], []
        for group in range(groups):
            members = [value for value, one in zip(row, of, strict=True) if one == group]
            if symmetric:
                scale, zero = 2 * max(map(abs, members)) / most or 1.0, 2 ** (bits - 1)
            else:
                low, high = min(0.0, *members), max(0.0, *members)
                scale = (high - low) / most or 1.0
                zero = min(max(round(-low / scale), 1), most)
            its_scales.append(float(torch.tensor(scale).half()))
            its_zeros.append(zero)
        codes.append([min(max(round(v / its_scales[g]) + its_zeros[g], 0), most) for v, g in zip(row, of, strict=True)])
        scales.append(its_scales)
        zeros.append(its_zeros)
    return codes, scales, zeros


def from_codes(codes: Whole, scales: Matrix, zeros: Whole, of: list[int]) -> Tensor:
    """float32, [rows, columns]"""
    return torch.tensor(
        [[(code - zeros[r][g]) * scales[r][g] for code, g in zip(row, of, strict=True)] for r, row in enumerate(codes)]
    )


def put_together(numbers: list[int], bits: int) -> list[int]:
    """As many to an int32 as it holds, the first in the lowest bits; the last one is filled up with 0."""
    each, found = 32 // bits, []
    for start in range(0, len(numbers), each):
        whole = sum(number << bits * at for at, number in enumerate(numbers[start : start + each]))
        found.append(whole - 2**32 if whole >= 2**31 else whole)
    return found


def columns_of(rows: list[list[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def ints(rows: Whole) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def gptq(
    matrix: Matrix, bits: int = 4, group: int = 32, symmetric: bool = False, order: bool = False, version: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """matrix [outputs, inputs]; qweight packs inputs, qzeros outputs; version 1 stores zeros less one."""
    of = lay_out(group, len(matrix[0]))
    if order:  # act-order: groups of inputs that do not lie side by side
        generator = torch.Generator().manual_seed(len(matrix))
        of = [of[at] for at in torch.randperm(len(of), generator=generator).tolist()]
    codes, scales, zeros = to_codes(matrix, of, bits, symmetric)
    stored = [[zero - (version == 1) for zero in row] for row in zeros]
    tensors = {
        "qweight": ints(columns_of([put_together(row, bits) for row in codes])),
        "qzeros": ints([put_together(row, bits) for row in columns_of(stored)]),
        "scales": torch.tensor(columns_of(scales)).half(),
        "g_idx": torch.tensor(of, dtype=torch.int32),
    }
    return tensors, from_codes(codes, scales, zeros, of)


def awq(matrix: Matrix, group: int = 32) -> tuple[dict[str, Tensor], Tensor]:
    """Eight neighbouring outputs share an int32, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    of = lay_out(group, len(matrix[0]))
    codes, scales, zeros = to_codes(matrix, of, 4, False)

    def packed(rows: Whole) -> Tensor:
        mixed = []
        for row in columns_of(rows):
            order = [row[start + at] for start in range(0, len(row), 8) for at in (0, 2, 4, 6, 1, 3, 5, 7)]
            mixed.append(put_together(order, 4))
        return ints(mixed)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": torch.tensor(columns_of(scales)).half()}
    return tensors, from_codes(codes, scales, zeros, of)


def packed(
    matrix: Matrix, bits: int = 4, group: int = 32, symmetric: bool = True, order: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' pack-quantized: columns packed, zeros packed along rows."""
    of = lay_out(group, len(matrix[0]))
    if order:
        of = of[::-1]
    codes, scales, zeros = to_codes(matrix, of, bits, symmetric)
    tensors = {
        "weight_packed": ints([put_together(row, bits) for row in codes]),
        "weight_scale": torch.tensor(scales).half(),
        "weight_shape": torch.tensor([len(matrix), len(matrix[0])]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = ints(columns_of([put_together(column, bits) for column in columns_of(zeros)]))
    if order:
        tensors["weight_g_idx"] = torch.tensor(of, dtype=torch.int32)
    return tensors, from_codes(codes, scales, zeros, of)


def int8(matrix: Matrix, symmetric: bool = True, one: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' int-quantized: a byte each, a scale for each row, or for all (`one`)."""
    of, width = [0] * len(matrix[0]), len(matrix[0])
    if one:
        codes, scales, zeros = to_codes(
            [[value for row in matrix for value in row]], [0] * width * len(matrix), 8, symmetric
        )
        codes = [codes[0][start : start + width] for start in range(0, len(codes[0]), width)]
        whole = torch.tensor([[code - 128 for code in row] for row in codes], dtype=torch.int8)
        return {"weight": whole, "weight_scale": torch.tensor(scales[0])}, whole.double().mul(scales[0][0]).float()
    codes, scales, zeros = to_codes(matrix, of, 8, symmetric)
    tensors = {
        "weight": torch.tensor([[code - 128 for code in row] for row in codes], dtype=torch.int8),
        "weight_scale": torch.tensor(scales),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.tensor([[row[0] - 128] for row in zeros], dtype=torch.int8)
    return tensors, from_codes(codes, scales, zeros, of)


def float8(
    matrix: Matrix, block: tuple[int, int] | None = None, name: str = "weight_scale", one: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """A byte each; a scale for all (`one`), for each row, or for each block. The largest number that the format has is 448."""
    rows, columns = len(matrix), len(matrix[0])
    high, wide = (rows, columns) if one else block or (1, columns)
    scales = [[0.0] * -(-columns // wide) for _ in range(-(-rows // high))]
    for r, row in enumerate(matrix):
        for c, value in enumerate(row):
            scales[r // high][c // wide] = max(scales[r // high][c // wide], abs(value) / 448)
    scales = torch.tensor(scales).tolist()  # as float32 has them
    codes = torch.tensor(
        [[value / scales[r // high][c // wide] for c, value in enumerate(row)] for r, row in enumerate(matrix)]
    )
    codes = codes.to(torch.float8_e4m3fn)
    numbers = [
        [code * scales[r // high][c // wide] for c, code in enumerate(row)]
        for r, row in enumerate(codes.double().tolist())
    ]
    return {"weight": codes, name: torch.tensor(scales[0][0] if one else scales)}, torch.tensor(numbers)


def compressed(format_: str, weights: Mapping[str, Any], inputs: Any = None, **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, **weights},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors", "format": format_, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, **more,
    }  # fmt: skip


def write(
    source: Path, folder: Path, config: dict[str, Any], quantize: Callable[..., tuple[dict[str, Tensor], Tensor]],
    turned: bool = False, leave_out: tuple[str, ...] = (), **settings: Any,
) -> tuple[Path, Path]:  # fmt: skip
    """(the quantized checkpoint, its twin) in `folder`. `turned`: the source stores [inputs, outputs], and the format does not."""
    paths = folder / "quantized", folder / "twin"
    for path in paths:
        shutil.copytree(source, path, copy_function=shutil.copy)
    values = json.loads((source / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    quantized, twin = dict[str, Tensor](), load_file(source / "model.safetensors")
    for name, tensor in twin.copy().items():
        layer, _, end = name.rpartition(".")
        matrix = (
            end == "weight"
            and tensor.dim() == 2
            and layer.split(".")[-1] not in ("wte", "wpe", "embed_tokens", "lm_head")
        )
        if not matrix or any(part in name for part in leave_out):
            quantized[name] = tensor
            continue
        tensors, numbers = quantize((tensor.T if turned else tensor).double().tolist(), **settings)
        twin[name] = (numbers.T if turned else numbers).contiguous()
        quantized |= {f"{layer}.{end}": part.contiguous() for end, part in tensors.items()}
    save_file(quantized, paths[0] / "model.safetensors")
    save_file(twin, paths[1] / "model.safetensors")
    return paths


def small_models(folder: Path) -> dict[str, Path]:
    """Two small models with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=96, **sizes)
    llama = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=96, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    folders = {}
    for name, model in (("gpt2", GPT2LMHeadModel(gpt2)), ("llama", LlamaForCausalLM(llama))):
        folders[name] = folder / name
        model.save_pretrained(folders[name])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folders[name] / file).write_bytes((BUNDLED_FOLDER / "gpt2-tiny" / file).read_bytes())
    return folders


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
CASES: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "gptq": (GPTQ, gptq, {}),
    "gptq one group": (GPTQ | {"group_size": -1, "sym": True}, gptq, {"group": -1, "symmetric": True}),
    "gptq last group smaller": (GPTQ | {"group_size": 40}, gptq, {"group": 40}),
    "gptq act-order": (GPTQ | {"desc_act": True}, gptq, {"order": True}),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq, {"version": 2}),
    "gptq 8 bits": (GPTQ | {"bits": 8}, gptq, {"bits": 8}),
    "gptq 8 bits, one group": (GPTQ | {"bits": 8, "group_size": -1, "sym": True}, gptq, {"bits": 8, "group": -1, "symmetric": True}),
    "awq": (AWQ, awq, {}),
    "awq one group": (AWQ | {"group_size": -1}, awq, {"group": -1}),
    "packed": (compressed("pack-quantized", GROUPS), packed, {}),
    "packed zeros": (compressed("pack-quantized", GROUPS | {"symmetric": False}), packed, {"symmetric": False}),
    "packed channels": (compressed("pack-quantized", {"num_bits": 4, "strategy": "channel"}), packed, {"group": -1}),
    "packed 8 bits": (compressed("pack-quantized", {"num_bits": 8, "strategy": "channel"}), packed, {"group": -1, "bits": 8}),
    "packed act-order": (compressed("pack-quantized", GROUPS | {"actorder": "group"}), packed, {"order": True}),
    "int8": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), int8, {}),
    "int8 W8A8": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "dynamic": True}), int8, {}),
    "int8 tensor": (compressed("int-quantized", {"num_bits": 8, "strategy": "tensor"}), int8, {"one": True}),
    "int8 zeros": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}), int8, {"symmetric": False}),
    "float8 channels": (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), float8, {}),
    "float8 tensor": (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}), float8, {"one": True}),
    "fp8": (FP8, float8, {"one": True}),
    "fp8 blocks": (FP8 | {"weight_block_size": [24, 40]}, float8, {"block": (24, 40), "name": "weight_scale_inv"}),
}  # fmt: skip
TURNED = ("gptq", "awq")
"""Methods that store a matrix the other way round than GPT-2 does."""


def weights_of(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """The model's weights; those of packed layers as their products have them."""
    runner = ModelRunner(EngineArgs.from_kwargs(model=str(folder), **COMMON | settings), CPU)
    runner.load_model()
    found: dict[str, Tensor] = dict(runner.model.named_parameters())
    for name, layer in runner.model.named_modules():
        if isinstance(layer, Linear) and layer.product is not None:
            product: Any = layer.product
            matrix = torch.empty(layer.out_features, layer.in_features)
            order = getattr(product, "order", None)
            matrix[:, slice(None) if order is None else order] = product.matrix()
            found[f"{name}.weight"] = matrix.T if isinstance(layer, Conv1D) else matrix
            if product.bias is not None:
                found[f"{name}.bias"] = product.bias
    return found


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> Path:
    """A copy with other tensors, and other keys in quantization_config."""
    to = to / "changed"
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    values = json.loads((to / "config.json").read_text())
    values["quantization_config"] |= config
    (to / "config.json").write_text(json.dumps(values))
    return to
