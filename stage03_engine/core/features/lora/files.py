"""The files of an adapter, as bytes. Imports no torch: front end and scheduler need to know only whether they are still the same."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stage03_engine.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_BYTES = {CONFIG: 1 << 20, WEIGHTS: 1 << 30}
OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def read_files(folder: Path) -> tuple[bytes, bytes]:
    """The contents of CONFIG and WEIGHTS. Raises ConfigError if one of them cannot be read."""
    found = []
    for name in (CONFIG, WEIGHTS):
        with _opened(folder / name) as file:
            found.append(file.read(MOST_BYTES[name]))
    return found[0], found[1]


def digest_of(files: tuple[bytes, bytes]) -> str:
    """The same for the same contents, 32 hex digits."""
    found = hashlib.sha256(len(files[0]).to_bytes(8, "little"))
    for content in files:
        found.update(content)
    return found.hexdigest()[:32]


def digest_in(folder: str, root: str | None = None) -> str:
    """`digest_of` the files of a folder, without holding them. With a `root`, they must lie below it when they are opened; whoever reads
    them later compares the digest. Raises ConfigError if one of them cannot be read."""
    with _opened(Path(folder, CONFIG), root) as file:
        config = file.read(MOST_BYTES[CONFIG])
    found = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    with _opened(Path(folder, WEIGHTS), root) as file:
        left = MOST_BYTES[WEIGHTS]
        while left and (piece := file.read(min(left, 1 << 20))):
            found.update(piece)
            left -= len(piece)
    return found.hexdigest()[:32]


@contextmanager
def _opened(path: Path, root: str | None = None) -> Iterator[BinaryIO]:
    """A file that may have become another since it was looked at: a pipe would block, and a large one fill the memory. Raises ConfigError."""
    try:
        with open(os.open(path, OPEN) if root is None else _open_below(root, path), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no ordinary file")
            if found.st_size > MOST_BYTES[path.name]:
                raise ValueError(f"it has more than {MOST_BYTES[path.name]} bytes")
            yield file
    except (OSError, ValueError) as error:  # ValueError: also a path that holds a zero byte
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _open_below(root: str, path: Path) -> int:
    """A descriptor of a file below `root`. Links are resolved first, and what they lead to is then opened folder by folder without following
    any: a link that is put there in between is refused. Raises OSError, ValueError."""
    top, real = Path(os.path.realpath(root)), Path(os.path.realpath(path))
    if real == top or not real.is_relative_to(top):
        raise ValueError("it is not below the folder that --lora-root names")
    *folders, name = real.relative_to(top).parts
    found = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for flags, each in [*((os.O_RDONLY | os.O_DIRECTORY, folder) for folder in folders), (OPEN, name)]:
        try:
            inner = os.open(each, flags | os.O_NOFOLLOW, dir_fd=found)
        finally:
            os.close(found)
        found = inner
    return found
