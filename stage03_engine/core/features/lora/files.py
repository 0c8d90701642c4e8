"""The files of an adapter, as bytes. Imports no torch: the scheduler needs to know only whether they are still the same."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from stage03_engine.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_BYTES = 1 << 30  # of a file


def read_files(folder: Path) -> tuple[bytes, bytes]:
    """The contents of CONFIG and WEIGHTS. Raises ConfigError if one of them cannot be read."""
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            found.append(_read(folder / name))
        except (OSError, ValueError) as error:  # ValueError: a path that holds a zero byte
            raise ConfigError(f"cannot read {folder / name}: {getattr(error, 'strerror', None) or error}") from error
    return found[0], found[1]


def _read(path: Path) -> bytes:
    """Of a file that may have become another since it was looked at: a pipe would block, and a large one fill the memory."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no ordinary file")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return file.read(MOST_BYTES)


def digest_of(files: tuple[bytes, bytes]) -> str:
    """The same for the same contents, 32 hex digits."""
    found = hashlib.sha256(len(files[0]).to_bytes(8, "little"))
    for content in files:
        found.update(content)
    return found.hexdigest()[:32]
