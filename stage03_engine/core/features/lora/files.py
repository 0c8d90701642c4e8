"""The files of an adapter, as bytes. Imports no torch: the scheduler needs to know only whether they are still the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stage03_engine.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read_files(folder: Path) -> tuple[bytes, bytes]:
    """The contents of CONFIG and WEIGHTS. Raises ConfigError if one of them cannot be read."""
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            found.append((folder / name).read_bytes())
        except (OSError, ValueError) as error:  # ValueError: a path that holds a zero byte
            raise ConfigError(f"cannot read {folder / name}: {getattr(error, 'strerror', None) or error}") from error
    return found[0], found[1]


def digest_of(files: tuple[bytes, bytes]) -> str:
    """The same for the same contents, 32 hex digits."""
    found = hashlib.sha256(len(files[0]).to_bytes(8, "little"))
    for content in files:
        found.update(content)
    return found.hexdigest()[:32]
