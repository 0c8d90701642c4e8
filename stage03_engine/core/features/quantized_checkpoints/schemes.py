"""What `quantization_config` in a config.json says, checked before anything is loaded (vLLM: layers/quantization, each `from_config`).

A key that changes what the numbers mean is read, or refused by name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from stage03_engine.errors import ConfigError

REFUSED = {
    "bitsandbytes": "its matrices are compressed for bitsandbytes' own GPU kernels; serve the model that it was made from, with --quantization int4",
    "gguf": "its weights lie in a file of llama.cpp's, not in safetensors; serve the model that it was made from, with --quantization int4",
}
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Of compressed-tensors."""


class Settings:
    """A quantization_config, read key by key. Every refusal names the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any], place: str) -> None:
        self.path, self.values, self.place = path, values, place

    def refuse(self, message: str) -> NoReturn:
        """Raise ConfigError about this object."""
        raise ConfigError(f"{self.path}: {self.place}: {message}")

    def only(self, key: str, *allowed: Any, names: tuple[str, ...] = ()) -> Any:
        """The value of `key`, or of the first of its other names that is there: one of `allowed`, whose first is meant by a missing key."""
        value = next((self.values[name] for name in (key, *names) if name in self.values), allowed[0])
        if not any(value == one and type(value) is type(one) for one in allowed):
            shown = ", ".join("none" if one is None else str(one) for one in allowed)
            self.refuse(f"{key} = {str(value)[:80]!r} is not supported, only {shown}")
        return value

    def group_size(self, key: str = "group_size", *names: str) -> int:
        """Inputs that share a scale; -1: all of them."""
        value = next((self.values[name] for name in (key, *names) if name in self.values), None)
        if type(value) is not int or not (value == -1 or 1 <= value < 2**31):
            self.refuse(f"{key} must be -1 or a positive integer, not {value!r}")
        return value

    def needs(self, key: str, *names: str) -> None:
        """Refuse a missing key."""
        if not any(name in self.values for name in (key, *names)):
            self.refuse(f"{key} is missing")

    def names(self, *keys: str) -> None:
        """Refuse what is neither missing nor a list of names."""
        for key in keys:
            value = self.values.get(key)
            if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
                self.refuse(f"{key} must be a list of names, not {str(value)[:80]!r}")

    def block(self, key: str) -> None:
        """Refuse what is neither missing nor the size of a block."""
        value = self.values.get(key)
        if value is not None and not (
            isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)
        ):
            self.refuse(f"{key} must be two positive integers, not {str(value)[:80]!r}")

    def inner(self, key: str) -> Settings:
        """The object at `key`."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.refuse(f"{key} must be an object, not {str(value)[:80]!r}")
        return Settings(self.path, value, f"{self.place}.{key}")


def _check_gptq(given: Settings) -> None:
    given.needs("bits")
    given.only("bits", 4, 8)
    given.group_size()
    given.only("desc_act", False, True)
    given.only("sym", True, False)
    given.only("checkpoint_format", "gptq", "gptq_v2")
    given.only("is_marlin_format", False)
    dynamic = given.values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not name.startswith("-:") for name in dynamic):
        given.refuse("dynamic gives layers settings of their own, which is not supported")


def _check_awq(given: Settings) -> None:
    given.only("bits", 4, names=("w_bit",))
    given.group_size("group_size", "q_group_size")
    given.only("zero_point", True)
    version = given.values.get("version", "gemm")
    if str(version).lower() != "gemm":
        given.refuse(f"version = {version!r} packs weights in another order; only gemm is supported")


def _check_fp8(given: Settings) -> None:
    given.only("activation_scheme", "dynamic", "static")
    given.only("fmt", "e4m3", "float8_e4m3fn")
    given.block("weight_block_size")


def _check_cache(given: Settings) -> None:
    """fp8 with a scale for each layer (vLLM: CompressedTensorsKVCacheMethod.validate_kv_cache_scheme)."""
    given.needs("num_bits")
    given.only("num_bits", 8)
    given.needs("type")
    given.only("type", "float")
    given.only("strategy", "tensor")
    given.only("symmetric", True)
    given.only("dynamic", False)


def _check_compressed(given: Settings) -> None:
    groups = given.inner("config_groups")
    given.only("quantization_status", "compressed")
    if given.values.get("transform_config"):
        given.refuse("transform_config is not supported")
    if given.values.get("kv_cache_scheme"):
        _check_cache(given.inner("kv_cache_scheme"))
    sparsity = given.values.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        given.refuse("sparsity_config: sparse weights are not supported")
    if not groups.values and not given.values.get("kv_cache_scheme"):
        given.refuse("config_groups names no group")
    for name in groups.values:
        group = groups.inner(name)
        format_ = group.values.get("format") or given.values.get("format")
        if format_ not in FORMATS:
            group.refuse(f"format {format_!r} is not supported, only {', '.join(FORMATS)}")
        targets = group.values.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            group.refuse(f"targets must be a list of names, not {str(targets)[:80]!r}")
        if group.values.get("input_activations") is not None:
            group.inner("input_activations")
        weights = group.inner("weights")
        bits = (4, 8) if format_ == "pack-quantized" else (8,)
        weights.needs("num_bits")
        weights.only("num_bits", *reversed(bits))
        kind = weights.only("type", "int", "float")
        if (kind == "float") != (format_ == "float-quantized") and format_ != "naive-quantized":
            weights.refuse(f"type {kind} does not go with format {format_}")
        weights.only("symmetric", True, False)
        strategy = weights.only("strategy", "channel", "tensor", "group", "block")
        if strategy == "group":
            weights.group_size()
        weights.block("block_structure")


CHECKS: dict[str, Callable[[Settings], None]] = {
    "gptq": _check_gptq,
    "awq": _check_awq,
    "compressed-tensors": _check_compressed,
    "fp8": _check_fp8,
}
"""quant_method -> what refuses settings that its reader (readers.py) does not know."""


def checked(path: Path, key: str, found: Any) -> dict[str, Any]:
    """What config.json at `path` has at `key`, with its `quant_method` filled in. Raises ConfigError."""
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {key} must be an object, not {str(found)[:80]!r}")
    method = found.get("quant_method", "compressed-tensors" if "config_groups" in found else None)
    given = Settings(path, found, key)
    given.names("modules_to_not_convert", "ignored_layers", "ignore")
    if not isinstance(method, str | None):
        given.refuse(f"quant_method must be a name, not {str(method)[:80]!r}")
    if method in REFUSED:
        given.refuse(f"quant_method {method} is not supported: {REFUSED[method]}")
    if method not in CHECKS:
        given.refuse(f"quant_method {str(method)[:80]!r} is not supported, only {', '.join(CHECKS)}")
    CHECKS[method](given)
    return found | {"quant_method": method}
