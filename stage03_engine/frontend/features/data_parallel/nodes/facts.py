"""What must be the same on all machines of a service: everything whose difference would change tokens.

(vLLM compares a hash of some settings, in the handshake between engine and front end, and does not say which one differs.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from stage03_engine import __version__
from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.model_path import weight_files

EQUAL = (
    "dtype", "load_format", "hf_overrides", "kv_cache_dtype", "enable_lora", "lora_modules", "lora_digests", "max_lora_rank", "lora_dtype", "seed", "max_model_len", "logits_processors", "quantization", "block_size", "batch_invariant", "speculative_config",
    "runner_type", "convert_type", "pooler_config", "disable_any_whitespace", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
)  # fmt: skip
"""The settings that are compared, those of features that are installed."""
_SAMPLE_BYTES = 1 << 16
"""How much of a file of weights is compared at its beginning, which names the tensors, and at its end, which has values."""


def facts_of(config: VllmConfig) -> dict[str, str]:
    """Name -> value, as texts. The model's folder may have another place on each machine: its name and its weights count."""
    found = {"version": __version__, "model": Path(config.model_config.model).name, "weights": _weights(config)}
    return found | {name: str(value) for name, value in _settings(config) if name in EQUAL}


def _settings(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    for section in SECTIONS:
        part = getattr(config, section)
        yield from ((field.name, getattr(part, field.name)) for field in fields(part))


def _weights(config: VllmConfig) -> str:
    """Tells models apart whose weights differ in shape, or at the end of a file; reading all of them would take as long as loading."""
    digest = hashlib.blake2b(repr(config.shape).encode(), digest_size=8)
    folder = config.model_config.model_path
    load_format = config.model_config.load_format
    for path in weight_files(Path(folder), load_format) if folder is not None else ():
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def differences(here: dict[str, str], there: dict[str, str]) -> str:
    """`dtype is float32 on the head and bfloat16 on the node`, all of them; empty if there are none."""
    names = [name for name in here | there if here.get(name) != there.get(name)]
    return ", ".join(
        f"{name} is {here.get(name, 'unknown')} on the head and {there.get(name, 'unknown')} on the node"
        for name in names
    )
