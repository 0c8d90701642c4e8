"""Who is read for: API keys take turns at the folder of blocks, so one key's many reads hold up no other's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE
from test_kv_transfer import SMALL, folder_flag, idle, model, request, run

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.features.kv_transfer.reader import BlockReader, Found
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset_prefix_cache

__all__ = ["model"]  # a fixture

LENGTH, BLOCKS = 40, 9  # tokens of a prompt; full blocks of 4 before its last token


class SlowDisk:
    """Stands in for the folder: each read waits until the test lets it go on, and is noted."""

    def __init__(self) -> None:
        self.read_so_far: list[bytes] = []
        self.go_on = threading.Event()
        self.missing: set[bytes] = set()
        self.broken: set[bytes] = set()

    def read(self, block_hash: bytes) -> bytes | None:
        assert self.go_on.wait(PATIENCE)
        self.read_so_far.append(block_hash)
        if block_hash in self.broken:
            raise RuntimeError("nobody expected this")
        return None if block_hash in self.missing else block_hash


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    disk = SlowDisk()
    yield disk
    disk.go_on.set()


@pytest.fixture
def reader(disk: SlowDisk) -> Iterator[BlockReader]:
    reader = BlockReader(disk)  # type: ignore[arg-type]
    yield reader
    reader.shutdown()


def asker(tenant: int | None, request_id: str) -> Any:
    """A request, as far as the reader looks at it."""
    return SimpleNamespace(tenant=tenant, request_id=request_id)


def hashes(name: str, count: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(count)]


def test_keys_take_turns_block_by_block(disk: SlowDisk, reader: BlockReader) -> None:
    """A key with five requests of nine blocks, then one of another key with three, and within a key one HTTP request after another."""
    crowd = [reader.read(asker(0, f"http{n}"), Found(0, 0), hashes("abcde"[n], 9)) for n in range(5)]
    small = reader.read(asker(1, "mine"), found := Found(0, 0), hashes("x", 3))
    disk.go_on.set()
    small.result(PATIENCE)
    assert found.blocks == hashes("x", 3)
    for each in crowd:
        each.result(PATIENCE)
    order = [name.decode() for name in disk.read_so_far]
    assert order.index("x2") <= 6, "the other key waited for more than as many blocks as it has"
    rest = [name for name in order if name[0] != "x"]
    assert rest == [f"{name}{number}" for number in range(9) for name in "abcde"]


def test_what_is_missing_ends_its_own_request(disk: SlowDisk, reader: BlockReader) -> None:
    disk.missing.add(b"a1")
    disk.go_on.set()
    for who, name, there in ((asker(None, "r"), "a", 1), (asker(None, "s"), "b", 4)):
        reader.read(who, found := Found(0, 0), hashes(name, 4)).result(PATIENCE)
        assert found.blocks == hashes(name, there)
    assert disk.read_so_far == [b"a0", b"a1", *hashes("b", 4)]


def test_what_nobody_waits_for_is_not_read(disk: SlowDisk, reader: BlockReader) -> None:
    """The block that is being read is not added either: what was taken must not grow."""
    reader.read(asker(0, "late"), late := Found(0, 0), hashes("a", 9))
    other = reader.read(asker(0, "other"), Found(0, 0), hashes("b", 2))
    reader.end(late)
    disk.go_on.set()
    other.result(PATIENCE)
    assert late.blocks == [] and set(disk.read_so_far) <= {b"a0", b"b0", b"b1"}


def test_an_error_that_nobody_expected_is_told_and_others_go_on(disk: SlowDisk, reader: BlockReader) -> None:
    disk.broken.add(b"a0")
    disk.go_on.set()
    with pytest.raises(RuntimeError, match="nobody expected this"):
        reader.read(asker(0, "r"), Found(0, 0), hashes("a", 2)).result(PATIENCE)
    reader.read(asker(0, "s"), found := Found(0, 0), hashes("b", 2)).result(PATIENCE)
    assert found.blocks == hashes("b", 2)


def test_the_thread_ends_with_the_engine(disk: SlowDisk, reader: BlockReader) -> None:
    reader.read(asker(0, "r"), Found(0, 0), hashes("a", 100))
    reader.shutdown()
    disk.go_on.set()
    [thread] = reader._thread._threads
    thread.join(PATIENCE)
    assert not thread.is_alive() and len(disk.read_so_far) <= 1


def test_the_requests_of_another_key_wait_for_their_own_blocks(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole engine: of two keys, the one with one request runs while most of the other's are still being read."""
    how = SMALL | {"num_gpu_blocks_override": 161, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    core = EngineCore(EngineArgs.from_kwargs(model=model, **how, **folder_flag(tmp_path)))
    prompts = {f"cmpl-{number}-0": [number] * LENGTH for number in range(1, 8)}
    reads, whole = threading.Semaphore(0), BlockStore.read
    try:
        for name, prompt in prompts.items():
            core.add_request(request(name, prompt))
            run(core, idle(core))  # one by one: not too many blocks wait to be written
        assert reset_prefix_cache(core)

        def slow(self: BlockStore, block_hash: bytes) -> bytes | None:
            assert reads.acquire(timeout=PATIENCE)
            return whole(self, block_hash)

        monkeypatch.setattr(BlockStore, "read", slow)
        for number, (name, prompt) in enumerate(prompts.items()):
            message = request(name, prompt)
            message.tenant = int(number == 6)  # the last one to come
            core.add_request(message)
        reads.release(2 * BLOCKS)
        assert set(run(core, lambda: len(core.scheduler.requests) < 7)) == {"cmpl-7-0"}
        reads.release(7 * BLOCKS)
        run(core, idle(core))
    finally:
        reads.release(7 * BLOCKS)
        core.shutdown()
