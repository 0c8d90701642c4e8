"""From the tensors of a quantized layer to its numbers: one reader for each format.

Every format says the same, weight = (code - zero) * scale, and differs in how codes and zeros are packed, in which weights share
a scale, and in names. A reader unpacks; `Grid.values` is the one place that multiplies. Sources: the papers (GPTQ: Frantar et al. 2022; AWQ:
Lin et al. 2023), and the documentation of GPTQModel, AutoAWQ, compressed-tensors and DeepSeek-V3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stage03_engine.errors import ConfigError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ: the column, of eight, that each four bits of an int32 belong to, lowest bits first."""
FLOAT8 = torch.float8_e4m3fn
QUANTIZED = (torch.int8, FLOAT8)  # formats of a `weight` that needs a scale


@dataclass(frozen=True)
class Grid:
    """A quantized matrix, unpacked: row r and column c are (codes - zero) * scale of the row's group that column c is in."""

    codes: Tensor  # [rows, columns] uint8, int8 or float8
    scale: Tensor  # [rows, groups]
    zero: Tensor | None = None  # [rows, groups]; None: 0
    group_of: Tensor | None = None  # int64 [columns]; None: groups of `group` columns
    group: int = 0  # columns in a group; the last may have fewer
    bits: int = 8  # of a code

    def groups(self) -> Tensor:
        """int64 [columns]: each column's group."""
        return torch.arange(self.codes.shape[1]) // self.group if self.group_of is None else self.group_of

    def order(self) -> Tensor | None:
        """int64 [columns]: the columns sorted by group; None if a group has more columns than others, so that they cannot lie side by side in equal
        pieces."""
        sorted_groups, order = self.groups().sort(stable=True)
        return order if torch.equal(sorted_groups, torch.arange(len(order)) // self.group) else None

    def largest_code(self) -> float:
        """The largest |code - zero| that there can be."""
        return torch.finfo(self.codes.dtype).max if self.codes.is_floating_point() else float(2**self.bits)

    def whole_numbers(self) -> Tensor | None:
        """int8 [rows, columns]: code - zero, if these are whole numbers of 8 bits, and a row has one scale."""
        if self.bits != 8 or self.codes.is_floating_point() or self.scale.shape[1] != 1:
            return None
        if self.zero is None:
            return self.codes
        middle = int(self.codes.dtype == torch.uint8) << 7
        return (self.codes.to(torch.int16) - middle).to(torch.int8) if (self.zero == middle).all() else None

    def values(self) -> Tensor:
        """float32 [rows, columns]"""
        of = self.groups()
        whole = self.codes.float()
        if self.zero is not None:
            whole -= self.zero.float()[:, of]
        return whole.mul_(self.scale.float()[:, of])


def unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits]: the codes of each number, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2).to(torch.uint8)


class Parts:
    """The tensors of one layer. Every refusal names the layer and the tensor."""

    def __init__(self, layer: str, tensors: Mapping[str, Tensor]) -> None:
        self.layer, self.tensors = layer, tensors

    def get(self, name: str, dtypes: tuple[torch.dtype, ...], *size: int | None) -> Tensor:
        """A tensor of this size (None: any). Raises ConfigError."""
        if (found := self.tensors.get(name)) is None:
            raise ConfigError(f"the checkpoint lacks {self.layer}.{name}, without which {self.layer} has no numbers")
        if found.dtype not in dtypes:
            raise ConfigError(f"{self.layer}.{name} holds {found.dtype}, not {' or '.join(map(str, dtypes))}")
        if len(size) != found.dim() or any(
            want not in (None, have) for want, have in zip(size, found.shape, strict=True)
        ):
            wanted = ["any" if want is None else want for want in size]
            raise ConfigError(f"{self.layer}.{name} has shape {list(found.shape)}, not {wanted}")
        return found

    def scale(self, name: str, *size: int | None) -> Tensor:
        """Floating point."""
        return self.get(name, (torch.float32, torch.float16, torch.bfloat16), *size)

    def groups(self, name: str, inputs: int, groups: int) -> Tensor | None:
        """int64 [inputs]: the group of each input, if the checkpoint says so."""
        if name not in self.tensors:
            return None
        found = self.get(name, (torch.int32, torch.int64), inputs).long()
        if len(found) and not 0 <= found.min() <= found.max() < groups:
            raise ConfigError(f"{self.layer}.{name} names a group that is not among the {groups} that have a scale")
        return found


def num_groups(inputs: int, group: int) -> tuple[int, int]:
    """(size of a group, number of groups); -1 is one group of all."""
    group = inputs if group == -1 else min(group, inputs)
    return group, -(-inputs // group)


class Reader:
    """Made with a checked quantization_config."""

    names: tuple[str, ...] = ()  # ends of the names of tensors that only a quantized layer has
    dropped: tuple[str, ...] = (
        "input_scale", "output_scale", "input_zero_point", "output_zero_point",
        "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point",
    )  # fmt: skip
    """Of activations, which are not quantized here, and of a KV cache, unless it has 8 bits: then `--kv-cache-dtype` takes them."""
    as_stored = (
        False  # True: rows, columns are those of the module's own weight; False: outputs, inputs, whatever it is
    )
    positive = False
    """Are all scales above 0? Formats that keep them in float16 may round one to 0, and AutoRound makes negative ones for GPTQ and AWQ."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def takes(self, end: str, tensor: Tensor) -> bool:
        """Does a tensor with this last name belong to a quantized layer?"""
        return end in self.names or (end == "weight" and tensor.dtype in QUANTIZED)

    def is_left_out(self, layer: str) -> bool:
        """Does the configuration say that this layer is not quantized?"""
        left_out = self.config.get("modules_to_not_convert") or self.config.get("ignored_layers") or ()
        return any(layer == name or f".{name}." in f".{layer}." for name in left_out)

    def inputs_of_8_bits(self, layer: str) -> bool:
        """Is the layer meant to be given inputs of 8 bits?"""
        return False

    def read(self, parts: Parts, rows: int, columns: int) -> Grid:
        """The layer's matrix. Raises ConfigError, with the name of the layer, for tensors that are missing or do not fit."""
        raise NotImplementedError


class GPTQ(Reader):
    """qweight int32 [inputs / pack, outputs], qzeros int32 [groups, outputs / pack], scales [groups, outputs], g_idx int32 [inputs]: the
    group of each input, which is not in order after `desc_act`. Format `gptq` stores zeros less 1, `gptq_v2` as they are."""

    names = ("qweight", "qzeros", "scales", "g_idx")

    def read(self, parts: Parts, rows: int, columns: int) -> Grid:
        bits = self.config["bits"]
        group, groups = num_groups(columns, self.config["group_size"])
        if rows % (32 // bits) or columns % (32 // bits):
            raise ConfigError(f"{parts.layer} is {rows} x {columns}, which int32 of {32 // bits} numbers cannot hold")
        codes = parts.get("qweight", (torch.int32,), columns * bits // 32, rows).T
        zeros = parts.get("qzeros", (torch.int32,), groups, rows * bits // 32)
        scale = parts.scale("scales", groups, rows).T
        less = self.config.get("checkpoint_format", "gptq") == "gptq"
        zero = unpack(zeros, bits).T.to(torch.int16) + less
        of = parts.groups("g_idx", columns, groups)
        if of is None and self.config.get("desc_act", False):
            raise ConfigError(f"the checkpoint lacks {parts.layer}.g_idx, which desc_act needs")
        return Grid(unpack(codes, bits), scale, zero, of, group, bits)


class AWQ(Reader):
    """qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]; eight columns in AWQ_ORDER."""

    names = ("qweight", "qzeros", "scales")

    def read(self, parts: Parts, rows: int, columns: int) -> Grid:
        size = next(self.config[key] for key in ("group_size", "q_group_size") if key in self.config)
        group, groups = num_groups(columns, size)
        if rows % 8 or columns % group:
            raise ConfigError(f"{parts.layer} has {rows} outputs and {columns} inputs, not multiples of 8 and {group}")
        codes = parts.get("qweight", (torch.int32,), columns, rows // 8)
        zeros = parts.get("qzeros", (torch.int32,), groups, rows // 8)
        scale = parts.scale("scales", groups, rows).T
        return Grid(self._ordered(codes), scale, self._ordered(zeros), None, group, 4)

    @staticmethod
    def _ordered(packed: Tensor) -> Tensor:
        """[n, outputs / 8] -> uint8 [outputs, n]"""
        place = torch.tensor([AWQ_ORDER.index(column) for column in range(8)])
        return unpack(packed, 4).unflatten(-1, (-1, 8))[..., place].flatten(-2).T


class FP8(Reader):
    """weight float8_e4m3 as stored, with one weight_scale, one for each output, or weight_scale_inv for each block of `weight_block_size`."""

    names = ("weight_scale", "weight_scale_inv")
    as_stored = True
    positive = True

    def read(self, parts: Parts, rows: int, columns: int) -> Grid:
        codes = parts.get("weight", (FLOAT8,), rows, columns)
        block = self.config.get("weight_block_size")
        if block is None:
            return Grid(codes, _one_or_each(parts, "weight_scale", rows), None, None, columns)
        return _blocks(parts, codes, "weight_scale_inv", block)


class CompressedTensors(Reader):
    """Names as in `FP8`; or weight int8 as stored; or weight_packed int32 [rows, columns / pack], whose codes have 2 ** (bits - 1) added.
    weight_scale is [1], [rows, 1] or [rows, groups]; weight_zero_point is of the same size, packed along rows where weights are."""

    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    as_stored = True
    positive = True

    def is_left_out(self, layer: str) -> bool:
        return any(_means(target, layer) for target in self.config.get("ignore") or ())

    def _group(self, layer: str) -> Mapping[str, Any]:
        """The settings of the group that the layer is in. One that is named goes before its class."""
        groups = self.config["config_groups"].values()
        named = [group for group in groups if any(_means(target, layer) for target in group["targets"])]
        by_class = [group for group in groups if {"Linear", "Conv1D"} & set(group["targets"])]
        if not (found := named or by_class):
            raise ConfigError(f"{layer} is quantized, but no group of quantization_config names it")
        settings: Mapping[str, Any] = found[0]
        return settings

    def inputs_of_8_bits(self, layer: str) -> bool:
        return (self._group(layer).get("input_activations") or {}).get("num_bits") == 8

    def read(self, parts: Parts, rows: int, columns: int) -> Grid:
        settings = self._group(parts.layer)
        format_, weights = settings.get("format") or self.config["format"], settings["weights"]
        strategy, bits = weights.get("strategy") or "channel", weights["num_bits"]
        if strategy == "block":
            codes = parts.get("weight", QUANTIZED, rows, columns)
            return _blocks(parts, codes, "weight_scale", weights.get("block_structure") or [])
        group, groups = num_groups(columns, weights["group_size"] if strategy == "group" else -1)
        packed = format_ == "pack-quantized"
        if packed:
            size = 32 // bits
            codes = unpack(parts.get("weight_packed", (torch.int32,), rows, -(-columns // size)), bits)[:, :columns]
        else:
            codes = parts.get("weight", (FLOAT8 if weights.get("type") == "float" else torch.int8,), rows, columns)
        zero: Tensor | None = None
        if strategy == "group":
            scale = parts.scale("weight_scale", rows, groups)
        else:
            scale = _one_or_each(parts, "weight_scale", rows)
        if not weights.get("symmetric", True):
            zero = self._zero(parts, packed, bits, rows, scale.shape[1], strategy == "tensor")
        elif packed:
            zero = torch.full_like(scale, 1 << (bits - 1), dtype=torch.int16)
        of = parts.groups("weight_g_idx", columns, groups)
        if of is None and weights.get("actorder") in ("group", True):
            raise ConfigError(f"the checkpoint lacks {parts.layer}.weight_g_idx, which actorder needs")
        return Grid(codes, scale, zero, of, group, bits)

    @staticmethod
    def _zero(parts: Parts, packed: bool, bits: int, rows: int, groups: int, one: bool) -> Tensor:
        name, size = "weight_zero_point", 32 // bits
        if not packed:
            found = parts.tensors.get(name)
            if one and found is not None and found.numel() == 1:
                return found.reshape(1, 1).expand(rows, 1)
            return parts.get(name, (torch.int8,), rows, groups)
        found = parts.get(name, (torch.int32,), -(-rows // size), groups)
        return unpack(found.T, bits).T[:rows]


def _one_or_each(parts: Parts, name: str, rows: int) -> Tensor:
    """[rows, 1]: a scale for all rows, or one for each."""
    found = parts.tensors.get(name)
    if found is not None and found.numel() == 1:
        return parts.scale(name, *found.shape).reshape(1, 1).expand(rows, 1)
    if found is not None and found.dim() == 1:
        return parts.scale(name, rows)[:, None]
    return parts.scale(name, rows, 1)


def _blocks(parts: Parts, codes: Tensor, name: str, block: list[int]) -> Grid:
    """A scale for each block of block[0] rows and block[1] columns; those at the edges may be smaller."""
    if len(block) != 2:
        raise ConfigError(f"{parts.layer} has blocks, whose size quantization_config does not say")
    rows, columns = codes.shape
    scale = parts.scale(name, -(-rows // block[0]), -(-columns // block[1]))
    return Grid(codes, scale.repeat_interleave(block[0], 0)[:rows], None, None, block[1])


def _means(target: str, layer: str) -> bool:
    """Does a name in `targets` or `ignore` mean this layer? `re:` begins a regular expression, which the beginning of the name must match."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], layer) is not None
        except re.error as error:
            raise ConfigError(f"quantization_config: {target!r} is no regular expression: {error}") from None
    return target == layer


READERS: dict[str, type[Reader]] = {"gptq": GPTQ, "awq": AWQ, "compressed-tensors": CompressedTensors, "fp8": FP8}
"""quant_method -> its reader."""
