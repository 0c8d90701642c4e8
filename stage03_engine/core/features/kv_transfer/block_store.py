"""A folder of KV-cache blocks (vLLM: the files of SharedStorageConnector). No torch.

A file is named after its block's hash, which stands for all tokens up to the block's end. Its folder is named after a hash of everything else that keys
and values depend on: weights, number format, size of a block. So whatever is found fits. A file appears whole, by renaming, and its checksum, which covers
both names, is compared when it is read: one that was torn, changed or misplaced counts as missing, and its tokens are computed.

Each of several workers writes its part of a block into a folder of its own, whose hash also stands for its rank and for how the model is cut. A block is there when all
of its parts are.

Several engines may use the same folder at the same time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.block_parts import num_workers, of_engine, part_bytes
from stage03_engine.core.kv_cache_size import head_layout
from stage03_engine.errors import ConfigError
from stage03_engine.model_path import weight_files

WHOLE, PART = ".kv", ".part"
_SUM_BYTES = hashlib.sha256().digest_size
_HARMLESS = (
    "cache_config", "scheduler_config", "disaggregation_config", "observability_config", "kv_transfer_config", "data_parallel_config", "front_ends", "node_config",
    "lora_config", "speculative_config", "structured_outputs_config", "parallel_config", "multimodal_config",
)  # fmt: skip
"""Sections that change no key and no value of a block (adapters are in the block's hash; `_cut` has what matters of the workers). Forgetting one here costs
sharing, never a wrong token."""


def _cut(config: VllmConfig, rank: int) -> str:
    """Which part of a block, of several: two ways to cut a model may give parts of the same size."""
    if num_workers(config) == 1:
        return ""
    parallel = config.parallel_config
    return f"{rank} {parallel.tensor_parallel_size} {parallel.pipeline_parallel_size} {part_bytes(config)}"


def compatibility_hash(config: VllmConfig, rank: int = 0) -> str:
    """32 hex digits that differ whenever one engine's blocks would be wrong for another, or one worker's parts for another; the same from the engine's
    configuration and from each worker's. Reads all of the weights. Raises ConfigError for files that cannot be read."""
    config = of_engine(config)
    found = hashlib.sha256(
        f"3 {config.cache_config.block_size} {head_layout(config)[0]} {_cut(config, rank)} ".encode()
    )
    model = replace(config.model_config, model_path=None, tokenizer_path=None, max_model_len=None)
    sections = {"model_config": model, "device_config": replace(config.device_config, num_threads=None)}
    for name in config.__dataclass_fields__:
        if name not in _HARMLESS:
            found.update(name.encode() + msgspec.msgpack.encode(sections.get(name, getattr(config, name))))
    for file in weight_files(Path(config.model_config.model_path or ""), config.model_config.load_format):
        try:
            now = file.stat()
            found.update(_file_digest(file, now.st_size, now.st_mtime_ns))
        except OSError as error:
            raise ConfigError(f"cannot read the weights in {file}: {error}") from error
    return found.hexdigest()[:32]


@cache
def _file_digest(file: Path, size: int, mtime_ns: int) -> bytes:
    """Once for scheduler and worker of an engine, as long as the file seems to be the same."""
    with file.open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").digest()


class BlockStore:
    """The blocks of one model, or one worker's parts of them, in a folder. `path` is the folder for all models, `max_bytes` what its files may take together: beyond
    that, the least recently read ones are removed. `num_writers` workers of an engine write there. Raises ConfigError if it cannot be made or written to, and if it is
    only read (`saves` False) and not there."""

    def __init__(
        self, path: str, compatible: str, block_bytes: int, max_bytes: int, saves: bool = True, num_writers: int = 1
    ) -> None:
        self._root, self.folder, self._key = Path(path), Path(path) / compatible, compatible.encode()
        self._block_bytes, self._max_bytes, self._num_writers = block_bytes, max_bytes, num_writers
        try:
            if saves:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder):
                    pass
            else:
                os.listdir(self._root)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"kv_transfer_config: cannot {'write to' if saves else 'read'} {path[:200]!r}: {why}"
            ) from None
        self._until_counted = 0  # bytes to write until the folder is counted again: others write there too

    @classmethod
    def of(cls, config: VllmConfig, rank: int = 0) -> BlockStore:
        """The one of `--kv-transfer-config`, for what this worker has of each block. Raises ConfigError, also if there is no room for a whole one."""
        transfer, sizes = config.kv_transfer_config, part_bytes(config)
        most, whole = transfer.max_bytes, sum(sizes)
        if most < whole + len(sizes) * _SUM_BYTES:
            raise ConfigError(f"kv_transfer_config: max_bytes {most} has no room for one block of {whole} bytes")
        compatible = compatibility_hash(config, rank)
        return cls(transfer.path, compatible, sizes[rank], most, transfer.saves, len(sizes))

    def only_of_others(self) -> bool:
        """Has the folder blocks, and none that fits this engine?"""
        try:
            named = [Path(each.path) for each in os.scandir(self._root) if _is_hex(each.name, 32) and each.is_dir()]
            filled = {folder for folder in named if any(name.endswith(WHOLE) for name in os.listdir(folder))}
        except OSError:
            return False
        return bool(filled) and self.folder not in filled

    def _file(self, block_hash: bytes) -> Path:
        return self.folder / (block_hash.hex() + WHOLE)

    def read(self, block_hash: bytes) -> bytes | None:
        """A block's keys and values; None if it is not there, or not what was written."""
        file = self._file(block_hash)
        try:
            with open(file, "rb", opener=_open_at_once) as stored:
                content = stored.read(_SUM_BYTES + self._block_bytes + 1) or b""
        except (OSError, MemoryError):
            return None
        with suppress(OSError):  # a folder that may only be read
            os.utime(file)  # it was of use
        checksum, data = content[:_SUM_BYTES], content[_SUM_BYTES:]
        whole = len(data) == self._block_bytes and checksum == checksum_of(self._key + block_hash, data)
        return data if whole else None

    def write(self, block_hash: bytes, data: bytes) -> None:
        """Keep a block. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it meanwhile
        if self._until_counted < (size := _SUM_BYTES + len(data)):
            self._make_room(size)
        handle, name = tempfile.mkstemp(PART, dir=self.folder)
        try:
            with open(handle, "wb") as stored:
                stored.write(checksum_of(self._key + block_hash, data) + data)
            os.replace(name, self._file(block_hash))
        except BaseException:
            os.unlink(name)
            raise
        self._until_counted -= size

    def _make_room(self, size: int) -> None:
        """Remove the least recently read files, until a tenth is free, or `size` bytes; this writer's share of that may be written before it counts again."""
        files = sorted(self._files())
        total, room = sum(each for _, each, _ in files), max(size, self._max_bytes // 10)
        for _, num_bytes, path in files:
            if total <= self._max_bytes - room:
                break
            with suppress(OSError):  # another engine was faster, or it is another user's
                os.unlink(path)
                total -= num_bytes
        self._until_counted = room // self._num_writers

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(when it was read last, bytes, path) of each block of all models, and of what a process that died left half written. Nothing else:
        the operator may have named a folder that holds other files too."""
        for folder in os.scandir(self._root):
            if not _is_hex(folder.name, 32) or not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder.path):
                name, kind = os.path.splitext(file.name)
                if kind == PART or (kind == WHOLE and _is_hex(name, 2 * _SUM_BYTES)):
                    try:
                        found = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield found.st_mtime, found.st_size, file.path


class WholeBlocks:
    """The folder as the scheduler's side reads it: all workers' parts. Raises ConfigError."""

    def __init__(self, config: VllmConfig) -> None:
        self._parts = [BlockStore.of(config, rank) for rank in range(num_workers(config))]

    def read(self, block_hash: bytes) -> bytes | None:
        """All parts of a block, by rank; None if one is not there, or not what was written."""
        parts = list[bytes]()
        for store in self._parts:
            if (part := store.read(block_hash)) is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def only_of_others(self) -> bool:
        """Has the folder blocks, and none that fits this engine?"""
        return self._parts[0].only_of_others()


def _open_at_once(path: str, flags: int) -> int:
    """A pipe in a file's place is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _is_hex(name: str, length: int) -> bool:
    return len(name) == length and set(name) <= set("0123456789abcdef")


def checksum_of(block_hash: bytes, data: bytes) -> bytes:
    """It covers the hash too: a file under another block's name is not that block."""
    checksum = hashlib.sha256(block_hash)
    checksum.update(data)
    return checksum.digest()
