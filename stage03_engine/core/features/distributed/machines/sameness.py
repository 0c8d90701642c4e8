"""What must be equal on all machines of an engine: the software, the model's shape, its weights.

Settings need not be: every worker gets those of the head. Imports no torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stage03_engine import __version__
from stage03_engine.config import VllmConfig
from stage03_engine.model_path import weight_files

PACKAGES = ("torch", "msgspec")
SAMPLES, SAMPLE_BYTES = 16, 4096


def must_agree(config: VllmConfig) -> dict[str, str]:
    """Name -> value, as text. Raises ModelNotFoundError and ConfigError for missing weights."""
    model = config.model_config
    found = {"the version of vllm-in-stages": __version__} | {
        f"the version of {name}": _version(name) for name in PACKAGES
    }
    found["load_format"] = "safetensors" if model.load_format == "auto" else model.load_format
    found |= {f"the model's {name}": str(value) for name, value in asdict(config.shape).items()}
    if files := weight_files(Path(model.model_path or ""), model.load_format):
        found["the model's weights"] = ", ".join(f"{file.name} {_fingerprint(file)}" for file in files)
    return found


def difference(here: dict[str, str], there: dict[str, str]) -> str | None:
    """The first thing that differs; None if nothing does."""
    for name in [*here, *there]:
        mine, theirs = here.get(name, "unknown"), there.get(name, "unknown")
        if mine != theirs:
            return f"{name}: {mine} on the head, {theirs} there"
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _fingerprint(file: Path) -> str:
    """Size and samples of a file of weights: reading all of it would take as long as loading it."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for sample in range(SAMPLES):
            opened.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:12]
