"""Wherever threads work for several API keys, the keys take turns: nobody's hundred things hold up another's one."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing
from contextvars import copy_context
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE

from stage02_server.features.hardening.fair_threads import PER_SECOND, SMALL, FairThreads
from stage02_server.features.hardening.turns import ADDRESS, TurnsByKey
from stage02_server.middleware import TENANT

ROOT = Path(__file__).parents[2]


def by(key: int | None, executor: Executor, work: Callable[[], object]) -> Future[object]:
    """What `work` becomes that this key submits."""

    def submit() -> Future[object]:
        TENANT.set(key)
        return executor.submit(work)

    return copy_context().run(submit)


class Held:
    """A pool whose threads all wait until the block is left."""

    def __init__(self, executors: list[Executor]) -> None:
        self._executors, self._go = executors, threading.Event()

    def __enter__(self) -> None:
        for executor in self._executors:
            begun = threading.Event()
            executor.submit(lambda begun=begun: (begun.set(), self._go.wait(PATIENCE)))
            assert begun.wait(PATIENCE)

    def __exit__(self, *_: object) -> None:
        self._go.set()


@pytest.fixture
def pool() -> Iterator[TurnsByKey]:
    with TurnsByKey(1) as pool:
        yield pool


keys = st.lists(st.sampled_from([None, 0, 1, 2]), max_size=40)


@given(keys=keys, cancelled=st.sets(st.integers(0, 39)))
def test_a_key_waits_for_one_turn_of_each_other(keys: list[int | None], cancelled: set[int]) -> None:
    done: list[int] = []
    with TurnsByKey(1) as pool, Held([pool]):
        futures = [by(key, pool, lambda number=number: done.append(number)) for number, key in enumerate(keys)]
        gone = {number for number, future in enumerate(futures) if number in cancelled and future.cancel()}
    assert sorted(done) == sorted(set(range(len(keys))) - gone)
    for key in set(keys):
        own = [number for number, other in enumerate(keys) if other == key]
        assert [number for number in done if number in own] == [number for number in own if number not in gone]
    if not gone:
        for turn, number in enumerate(done):
            # As many of each other key were done before as of this one, and perhaps one more
            mine = sum(keys[other] == keys[number] for other in done[:turn])
            for other in set(keys) - {keys[number]}:
                assert sum(keys[earlier] == other for earlier in done[:turn]) <= mine + 1


def test_addresses_take_turns_where_no_key_says_who_asks(pool: TurnsByKey) -> None:
    done: list[str] = []

    def submit(address: str, name: str) -> Future[None]:
        ADDRESS.set(address)
        return pool.submit(done.append, name)

    with Held([pool]):
        crowd = [copy_context().run(submit, "192.0.2.1", f"a{number}") for number in range(20)]
        last = copy_context().run(submit, "192.0.2.2", "b")
    for future in (*crowd, last):
        future.result(PATIENCE)
    assert done.index("b") <= 1, done  # one turn of the other


def test_an_error_reaches_who_waits(pool: TurnsByKey) -> None:
    with pytest.raises(ZeroDivisionError):
        by(1, pool, lambda: 1 // 0).result(PATIENCE)
    assert by(2, pool, lambda: "next").result(PATIENCE) == "next"


@pytest.mark.parametrize("size", [1, SMALL, 20 * PER_SECOND])
def test_keys_take_turns_at_tokenizing_too(size: int) -> None:
    done: list[str] = []
    with closing(Closing(FairThreads("test"))) as held:
        with Held([held.threads.of(SMALL + 1), held.threads.of(1)]):
            for number in range(20):
                by(0, held.threads.of(size), lambda number=number: done.append(f"a{number}"))
            last = by(1, held.threads.of(size), lambda: done.append("b"))
        last.result(PATIENCE)
    # Two threads, each of which may have begun with one of the first key's
    assert done.index("b") <= 3, done


class Closing:
    def __init__(self, threads: FairThreads) -> None:
        self.threads = threads

    def close(self) -> None:
        self.threads.shutdown()


SERVES_NO_KEY = {
    "features/api_servers/engines.py": "watches engines",
    "features/api_servers/server_process.py": "watches the launcher",
    "features/hardening/loop_watch.py": "watches the event loop",
    "routes.py": "loads code, once, and works on nothing that a client sent",
    "features/page/docs.py": "makes one text, the same for all",
    "features/audio/decoder.py": "each client has a turn: a lock for each",
    "features/hardening/fair_threads.py": "holds the turns itself",
    "features/hardening/turns.py": "holds the turns itself",
    "features/chat_template/offline.py": "is LLM.chat's, where there is no server",
    "features/otlp/exporter.py": "sends what has ended, and bounds what waits",
    "features/chat_template/renderer.py": "takes turns, or plain threads where that room was deleted",
    "features/images/decoder.py": "takes turns, or plain threads where that room was deleted",
}


def test_there_are_no_other_threads() -> None:
    """A pool of plain threads is first come, first served: whoever adds one must say why no key waits for another."""
    found = set()
    for file in (ROOT / "stage02_server").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("ThreadPoolExecutor", "Thread"):
                found.add(str(file.relative_to(ROOT / "stage02_server")))
    assert found == set(SERVES_NO_KEY)
