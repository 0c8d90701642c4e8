"""What must be the same on all machines of a service: everything whose difference would change tokens.

(vLLM compares a hash of some settings, in the handshake between engine and front end, and does not say which one differs.) Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stage03_engine import __version__
from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.model_path import weight_files

_PACKAGES = ("torch", "msgspec")
_SAMPLES, _SAMPLE_BYTES = 16, 16_384
_MOST_NAMED = 3


def facts_of(config: VllmConfig, settings: Collection[str] = ()) -> dict[str, str]:
    """Name -> value, as texts: the software, these settings, the model's shape and weights. Its folder may have another place on each machine.

    Raises ModelNotFoundError and ConfigError for missing weights.
    """
    model = config.model_config
    found = {"version": __version__} | {f"{name}'s version": _version(name) for name in _PACKAGES}
    found["load_format"] = "safetensors" if model.load_format == "auto" else model.load_format
    found |= {name: str(value) for name, value in _settings(config) if name in settings}
    found |= {f"the model's {name}": str(value) for name, value in asdict(config.shape).items()}
    if files := weight_files(Path(model.model_path or ""), model.load_format):
        found["weights"] = ", ".join(f"{file.name} {_fingerprint(file)}" for file in files)
    return found


def differences(here: dict[str, str], there: dict[str, str]) -> str:
    """`dtype is float32 on the head and bfloat16 on the node`, at most three of them; empty if there are none."""
    names = [name for name in here | there if here.get(name) != there.get(name)]
    named = ", ".join(
        f"{name} is {here.get(name, 'unknown')} on the head and {there.get(name, 'unknown')} on the node"
        for name in names[:_MOST_NAMED]
    )
    return f"{named} (and {len(names) - _MOST_NAMED} more)" if len(names) > _MOST_NAMED else named


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _settings(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    for section in SECTIONS:
        part = getattr(config, section)
        yield from ((field.name, getattr(part, field.name)) for field in fields(part))


def _fingerprint(file: Path) -> str:
    """Size and samples of a file of weights: reading all of it would take as long as loading it."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for sample in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]
