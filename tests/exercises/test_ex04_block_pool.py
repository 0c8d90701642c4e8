"""The judge of exercise 4: lists of actions on a small pool, beside a naive model of lists that are searched from end to end."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hypothesis import given, strategies as st
from judging import Judge

from stagetrace import trace

judge = Judge(4)
NAMES = "xyz"  # what blocks may hold: the hash of x is b"x"
KINDS = ["nothing", "allocate", *["cache"] * 2, *["free"] * 2, *["hit"] * 2, "free all", "free twice", "reset"]
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 2)), min_size=12, max_size=12)


@judge.settings(30)
@given(
    tokens=st.lists(st.integers(0, 2**40), min_size=1, max_size=3), parent=st.sampled_from([b"", b"parent"]),
    salt=st.sampled_from([None, "", "pepper", "ä"]),
)  # fmt: skip
def test_the_hash_names_all_tokens_up_to_its_end(
    impl: ModuleType, tokens: list[int], parent: bytes, salt: str | None
) -> None:
    with judge.case(call=f"hash_block_tokens({parent!r}, {tokens}, {salt!r})"):
        salted = b"" if salt is None else b"salt" + salt.encode()
        right = hashlib.sha256(parent + struct.pack(f"<{len(tokens)}q", *tokens) + salted).digest()
        got = impl.hash_block_tokens(parent, list(tokens), salt)
        judge.equal("hash", short(right), short(got))


def short(digest: Any) -> str:
    return f"{digest[:8].hex()}... ({len(digest)} bytes)" if isinstance(digest, bytes) else repr(digest)


@dataclass
class Model:
    """What the pool must look like; `log` is what was done to it."""

    num_blocks: int
    log: list[str] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    references: dict[int, int] = field(default_factory=dict)
    held: dict[int, str] = field(default_factory=dict)  # block -> what it can be found by
    freed: bool = False  # has any block been given back?

    def __post_init__(self) -> None:
        self.queue = list(range(1, self.num_blocks))

    def __repr__(self) -> str:
        return f"a pool of {self.num_blocks} blocks; " + "; ".join(self.log)

    def holding(self, name: str) -> int | None:
        return next((block for block, held in self.held.items() if held == name), None)

    def chosen(self, place: int, blocks: list[int]) -> int:
        return sorted(blocks)[place % len(blocks)]


@judge.settings(20)
@given(num_blocks=st.integers(2, 5), counts=st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_a_new_pool_hands_out_its_blocks_in_order(impl: ModuleType, num_blocks: int, counts: list[int]) -> None:
    model = Model(num_blocks)
    with judge.case(actions=model):
        pool = impl.BlockPool(num_blocks)
        judge.equal("balance", f"num_usable {num_blocks - 1}", f"num_usable {pool.num_usable}")
        for count in counts:
            allocate(pool, model, count)


@judge.settings(200)
@given(num_blocks=st.integers(2, 5), actions=ACTIONS)
def test_actions_on_a_pool(impl: ModuleType, num_blocks: int, actions: list[tuple[str, int, int]]) -> None:
    model = Model(num_blocks)
    with judge.case(actions=model):
        pool = impl.BlockPool(num_blocks)
        for kind, a, b in actions:
            act(pool, model, kind, a, b)
        if model.queue:  # the whole queue, in its order
            allocate(pool, model, len(model.queue))


def act(pool: Any, model: Model, kind: str, a: int, b: int) -> None:
    """Do one action. For one that nobody may do now, the action that leads to it is done instead."""
    unnamed = sorted(set(model.references) - set(model.held))
    if kind == "hit" and model.held:
        touch(pool, model, [model.chosen(a, list(model.held))])
    elif kind in ("cache", "hit") and unnamed:
        cache(pool, model, model.chosen(a, unnamed), NAMES[b])
    elif kind == "free" and model.references:
        free(pool, model, [model.chosen(a, list(model.references))])
    elif kind == "free all" and model.references:
        free(pool, model, sorted(model.references)[:: -1 if b else 1])
    elif kind == "free twice":
        free_again(pool, model, model.chosen(a, [0, *model.queue]))
    elif kind == "reset":
        reset(pool, model)
    elif kind != "nothing":
        allocate(pool, model, a)


def allocate(pool: Any, model: Model, count: int) -> None:
    model.log.append(f"allocate {count}")
    if count > len(model.queue):
        judge.raises("too_few", ValueError, lambda: pool.allocate(count))
        same(pool, model, "too_few", "too_few")
        return
    expected, model.queue = model.queue[:count], model.queue[count:]
    with patch.object(trace, "on", True), patch.object(trace, "emit") as emit:
        got = pool.allocate(count)
    judge.holds("balance", 0 not in got, "never block 0", got)
    judge.equal("no_hash_first" if model.freed else "oldest", expected, got)
    model.log[-1] += f" -> {got}"
    evicted = [block for block in expected if block in model.held]
    for block in expected:
        model.references[block] = 1
        model.held.pop(block, None)
    same(pool, model, "balance", "evict")
    told = [call.kwargs["block"] for call in emit.call_args_list if call.args == ("kv.evicted",)]
    judge.holds("evict", told == evicted, f"evicted() is called for {evicted}", f"for {told}")


def cache(pool: Any, model: Model, block: int, name: str) -> None:
    model.log.append(f"cache {block} as {name}")
    new = model.holding(name) is None
    got = pool.cache(block, name.encode())
    model.log[-1] += f" -> {got}"
    if new:
        model.held[block] = name
    judge.holds("first_stays", got is new, f"cache returns {new}", repr(got))
    same(pool, model, "balance", "first_stays")


def free(pool: Any, model: Model, blocks: list[int]) -> None:
    model.log.append(f"free {blocks}")
    pool.free(list(blocks))
    for block in blocks:
        model.references[block] -= 1
        if not model.references[block]:
            del model.references[block]
            model.queue.insert(len(model.queue) if block in model.held else 0, block)
    model.freed = True
    same(pool, model, "references", "kept")


def touch(pool: Any, model: Model, blocks: list[int]) -> None:
    model.log.append(f"touch {blocks}")
    pool.touch(list(blocks))
    model.queue = [block for block in model.queue if block not in blocks]
    for block in blocks:
        model.references[block] = model.references.get(block, 0) + 1
    same(pool, model, "touched", "kept")


def free_again(pool: Any, model: Model, block: int) -> None:
    model.log.append(f"free [{block}], which is not in use")
    judge.raises("not_in_use", ValueError, lambda: pool.free([block]))
    same(pool, model, "not_in_use", "kept")


def reset(pool: Any, model: Model) -> None:
    model.log.append("reset")
    idle, got = not model.references, pool.reset()
    model.log[-1] += f" -> {got}"
    judge.holds("reset", got is idle, f"reset returns {idle}", repr(got))
    if idle:
        model.held.clear()
    same(pool, model, "reset", "reset")


def same(pool: Any, model: Model, of_numbers: str, of_hashes: str) -> None:
    """Numbers and hashes are those of the model; the names say which sentence is broken if not."""
    judge.equal(of_numbers, f"num_free {len(model.queue)}", f"num_free {pool.num_free}")
    used = len(model.references) / (model.num_blocks - 1)
    among = list(range(1, model.num_blocks))
    counted = pool.num_free_among(list(among))
    judge.equal(of_numbers, f"num_free_among({among}) = {len(model.queue)}", f"num_free_among({among}) = {counted}")
    judge.holds("balance", abs(pool.usage - used) < 1e-9, f"usage {used:.2f}", f"usage {pool.usage}")
    for name in NAMES:
        found = pool.lookup(name.encode())
        judge.equal(of_hashes, f"lookup {name} -> {model.holding(name)}", f"lookup {name} -> {found}")
