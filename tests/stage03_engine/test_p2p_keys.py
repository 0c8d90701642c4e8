"""Blocks that wait for a decode server belong to whom they were computed for: no key crowds another out, nobody guesses where they are, and all answers to one
prompt get them."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENCE
from small_gpt2 import first_layers
from test_p2p_connector import DO_REMOTE_DECODE, PROMPTS, SECRET, core_of, params_of

from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.kv_transfer.connector import KVConnectorHook
from stage03_engine.messages import EngineCoreRequest

BLOCKS = 202


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(first_layers(tmp_path_factory.mktemp("keys") / "model", 2))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGES_NODE_SECRET", SECRET)


@pytest.fixture
def producer(model: str) -> Iterator[EngineCore]:
    made = core_of(model, "kv_producer", num_gpu_blocks_override=BLOCKS)
    yield made
    made.shutdown()


def hook_of(core: EngineCore) -> KVConnectorHook:
    [hook] = [hook for hook in core.scheduler.hooks if isinstance(hook, KVConnectorHook)]
    return hook


def compute(core: EngineCore, *asked: tuple[str, int | None, list[int]]) -> dict[str, dict[str, Any] | None]:
    """(name, key, prompt) -> where its blocks are."""
    for name, key, prompt in asked:
        params = params_of("greedy", max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
        core.add_request(EngineCoreRequest(name, prompt, params, cache_salt=f"{key}", tenant=key))
    found: dict[str, dict[str, Any] | None] = {}
    while len(found) < len(asked):
        for output in core.step().outputs:
            if output.finish_reason is not None:
                found[output.request_id] = (output.result or {}).get("kv_transfer_params")
        for hook in core.scheduler.hooks:
            hook.check_invariants()
    return found


def give_back(core: EngineCore, told: dict[str, dict[str, Any] | None]) -> None:
    """And wait until all is free."""
    core.call("release_kv_blocks", [where["remote_request_id"] for where in told.values() if where is not None])
    end = time.monotonic() + PATIENCE
    while hook_of(core).held_blocks:
        assert time.monotonic() < end
        compute(core, (f"then {time.monotonic()}", None, [7]))
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_usable


def prompt_of(number: int, size: int = 41) -> list[int]:
    return [number % 97, *range(5, 4 + size)]


def test_a_key_leaves_room_for_every_other(producer: EngineCore) -> None:
    """However many keys compute and never fetch, each in its turn: the next one has room, as much as is left after it."""
    most = producer.scheduler.kv_cache_manager.block_pool.num_usable // 4
    told: dict[str, dict[str, Any] | None] = {}
    held, before = Counter[int](), 0
    for key in range(4):
        for number in range(20):
            told |= compute(producer, (f"{key} {number}", key, prompt_of(number)))
        now = hook_of(producer).held_blocks.total()
        held[key], before = now - before, now
        assert 0 < held[key] <= most - now + 1, f"key {key}: {held} of {most}"
    assert told["3 0"] is not None and told["0 19"] is None
    give_back(producer, told)
    assert compute(producer, ("again", 0, prompt_of(3)))["again"] is not None, "it has its room again"


def test_one_key_alone_or_none_may_hold_the_quarter(producer: EngineCore) -> None:
    most = producer.scheduler.kv_cache_manager.block_pool.num_usable // 4
    told = compute(producer, *((f"{number}", None, prompt_of(number)) for number in range(20)))
    assert hook_of(producer).held_blocks.total() == most
    give_back(producer, told)


def test_mixed_keys_in_one_step_are_counted(producer: EngineCore) -> None:
    """Whatever comes and goes: never more than the quarter, and all is free in the end."""
    rng, names = random.Random(1), iter(range(10_000))
    most = producer.scheduler.kv_cache_manager.block_pool.num_usable // 4
    for _ in range(8):
        asked = [
            (f"r{next(names)}", rng.choice([0, 1, 2]), prompt_of(next(names), rng.randint(5, 60))) for _ in range(9)
        ]
        told = compute(producer, *asked)
        assert hook_of(producer).held_blocks.total() <= most
        give_back(producer, told)


def test_no_place_tells_another(producer: EngineCore) -> None:
    """A place is a random number: whoever knows one, or a thousand, knows no other."""
    told = compute(producer, *((f"{number}", 0, prompt_of(number, 6)) for number in range(20)))
    places = sorted(where["remote_request_id"] for where in told.values() if where is not None)
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert len(places) == 20 and min(gaps) > 1 << 32 and max(places) < 1 << 63
    give_back(producer, told)


@pytest.mark.parametrize("count", [2, 3])
def test_all_answers_to_one_prompt_get_its_blocks(model: str, count: int) -> None:
    """They are one place there, and one transfer: each is admitted with all that could come."""
    producer, consumer = (core_of(model, role) for role in ("kv_producer", "kv_consumer"))
    try:
        [where] = compute(producer, ("a", None, PROMPTS[0])).values()
        for number in range(count):
            params = params_of("seeded", max_tokens=4, seed=number, kv_transfer_params=where)
            consumer.add_request(EngineCoreRequest(f"{number}", PROMPTS[0], params, cache_salt="None"))
        ended, cached = set[str](), dict[str, int]()
        end = time.monotonic() + PATIENCE
        while len(ended) < count:
            assert time.monotonic() < end
            for output in consumer.step().outputs:
                cached.setdefault(output.request_id, output.num_cached_tokens)
                ended |= {output.request_id} if output.finish_reason is not None else set()
        assert cached == {f"{number}": 76 for number in range(count)}
        give_back(producer, {})
    finally:
        producer.shutdown()
        consumer.shutdown()
