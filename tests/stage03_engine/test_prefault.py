"""The memory of the blocks that come next is there before a request writes to them, and holds what it held."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from patience import PATIENCE
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.prefault import hook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.native import library
from stagetrace import read_run

pytestmark = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
HOOK = "stage03_engine.core.features.prefault.hook:PrefaultHook"
BUDGET, BLOCK = 64, 16
AHEAD = BUDGET // BLOCK  # blocks
SETTINGS: dict[str, Any] = {
    "device": "cpu", "num_threads": 2, "dtype": "float32", "attention_backend": "native", "block_size": BLOCK, "max_model_len": 256,
    "max_num_batched_tokens": BUDGET, "max_num_seqs": 8, "kv_cache_memory_bytes": 1_600_000_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layers(tmp_path_factory.mktemp("model") / "short", 2)


def resident(cache: torch.Tensor, block: int) -> bool:
    """All pages of a block's keys and values are in memory."""
    for half in cache:
        start = half[block].data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = half[block].data_ptr() + half[block].nbytes - start
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0, ctypes.get_errno()
        if not all(page & 1 for page in pages):
            return False
    return True


def settled() -> None:
    """No thread looks for memory any longer."""
    for thread in threading.enumerate():
        if thread.name == "prefault":
            thread.join(60 * PATIENCE)
            assert not thread.is_alive()


def ready(caches: list[torch.Tensor]) -> int:
    """Blocks from the first on that are in memory in every layer."""
    settled()
    blocks = range(caches[0].shape[1])
    return next(block for block in blocks if not all(resident(cache, block) for cache in caches))


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """Those that have allocated their cache."""
    found: list[ModelRunner] = []
    allocate = ModelRunner.initialize_kv_cache
    monkeypatch.setattr(ModelRunner, "initialize_kv_cache", lambda self, n: found.append(self) or allocate(self, n))
    return found


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="mincore tells this on Linux alone")
def test_a_steps_blocks_are_ready_at_start_and_again_after_requests(
    model: Path, tmp_path: Path, runners: list[ModelRunner]
) -> None:
    """Large pages may bring some blocks more, but never all."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(model), trace=str(tmp_path), **SETTINGS) as llm:
        caches = runners[0].kv_caches
        large = -(-(2 << 20) // caches[0][0, 0].nbytes)  # blocks in a page of 2 MiB
        assert AHEAD <= ready(caches) <= AHEAD + 2 * large < caches[0].shape[1] // 4
        used = 1  # block 0 is never given to a request
        for first in range(2, 40, 6):
            llm.generate([{"prompt_token_ids": [first, *range(200)]}], params)
            used += 200 // BLOCK  # the last block is not full: the next request gets it first
            assert ready(caches) >= used + AHEAD // 2, first  # at least half of the next step's
    events = read_run(tmp_path).named("kv_cache.prefault")
    assert events[0].args["first"] == 0 and events[0].args["end"] == AHEAD
    for before, after in itertools.pairwise(events):
        assert before.args["end"] <= after.args["first"] < after.args["end"]  # none is touched twice
        assert after.args["end"] - after.args["first"] <= AHEAD


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="mincore tells this on Linux alone")
def test_the_switch_leaves_the_memory_where_it_is(model: Path, runners: list[ModelRunner]) -> None:
    with LLM(str(model), prefault_kv_cache=False, **SETTINGS):
        assert ready(runners[0].kv_caches) == 0


@pytest.mark.parametrize(
    ("more", "installed"),
    [
        ({}, True),
        ({"prefault_kv_cache": False}, False),
        ({"attention_backend": "torch"}, False),  # nobody compiled anything
        ({"enable_sleep_mode": True}, False),  # gives memory back
    ],
)
def test_who_gets_it(model: Path, more: dict[str, Any], installed: bool) -> None:
    config = EngineArgs(model=str(model), **SETTINGS | more).create_engine_config()[0]
    assert (HOOK in config.hooks("runner")) is installed


def test_an_engine_that_ends_before_its_thread_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread finds no cache, and says nothing."""
    waiting: list[threading.Thread] = []

    class Late(threading.Thread):
        def start(self) -> None:
            waiting.append(self)

    monkeypatch.setattr(hook, "Thread", Late)
    with LLM(str(model), **SETTINGS):
        pass
    for thread in waiting:
        thread.run()
    assert len(waiting) == 1


@given(st.data())
def test_memory_holds_what_it_held(data: st.DataObject) -> None:
    """Whatever lies in it, at any address, in any number of pieces."""
    held = np.frombuffer(bytearray(data.draw(st.binary(min_size=1, max_size=30_000))), dtype=np.uint8)
    before = held.copy()
    starts = sorted(data.draw(st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=4)))
    num_bytes = data.draw(st.integers(1, len(held) - starts[-1]))
    addresses = (ctypes.c_void_p * len(starts))(*(held.ctypes.data + start for start in starts))
    library.function("prefault", "pll")(ctypes.addressof(addresses), len(starts), num_bytes)
    assert (held == before).all()
