"""Watching the scheduler: what watchers are told, that nobody else pays for it, and that nothing of it grows without bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from toy_engine import ToyEngine, random_life

from stage03_engine.core.features.scheduler_watch import scheduler_watch
from stage03_engine.core.features.scheduler_watch.scheduler_watch import SHOWN, SchedulerWatch
from stage03_engine.frontend.features import engine_watch
from stage03_engine.frontend.features.engine_watch import EngineWatch, WatchError
from stagetrace import VOCABULARY, read_run, trace


@pytest.fixture(autouse=True)
def no_watcher_stays() -> Iterator[None]:
    yield
    trace.watch(None)
    assert not trace.on


def told(watch: SchedulerWatch) -> list[dict[str, Any]]:
    return [json.loads(line) for line in watch.take()]


def test_nothing_is_emitted_before_and_after() -> None:
    engine = ToyEngine()
    watch = SchedulerWatch(engine.scheduler)
    engine.add_random("before")
    engine.run()
    assert not trace.on and not watch.take()
    watch.start()
    assert trace.on
    engine.add_random("during")
    engine.run()
    assert {event.get("req") for event in told(watch)} == {None, "during"}
    watch.stop()
    assert not trace.on
    engine.add_random("after")
    engine.run()
    assert not watch.take()


@given(st.integers(0, 10_000), st.booleans())
def test_events_have_the_arguments_of_the_list_and_no_token(seed: int, prompts: bool) -> None:
    engine = ToyEngine(seed, num_blocks=40, num_drafts=3, swap_blocks=seed % 2 * 20)
    watch = SchedulerWatch(engine.scheduler)
    watch.start()
    trace.prompts = prompts
    try:
        random_life(engine, 8)
    finally:
        trace.prompts = False
    events = told(watch)
    trace.watch(None)
    assert events[0]["name"] == "sched.state"
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    for event in events:
        args = event.get("args", {})
        assert set(args) == set(SHOWN[event["name"]]) <= set(VOCABULARY[event["name"]].args)
        assert not {"token_ids", "params", "block_hashes", "prompt", "text"} & set(args)


def test_a_recording_is_the_same_with_a_watcher(tmp_path: Path) -> None:
    """Watching changes neither what is decided nor what is written, but for its own event."""

    def recorded(name: str, watched: bool) -> list[Any]:
        trace.hold("EngineCore_DP0")
        trace.open(str(tmp_path / name))
        engine = ToyEngine(3, num_blocks=40)
        if watched:
            SchedulerWatch(engine.scheduler).start()
        random_life(engine, 12)
        trace.close()
        trace.watch(None)
        events = [e for e in read_run(tmp_path / name).events if e.name not in ("run.start", "sched.state")]
        return [(e.name, e.req, e.step, {k: v for k, v in e.args.items() if k != "block_hashes"}) for e in events]

    assert recorded("alone", False) == recorded("watched", True)


def test_who_is_too_far_behind_gets_the_state_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_watch, "MAX_EVENTS", 50)
    engine = ToyEngine(1)
    watch = SchedulerWatch(engine.scheduler)
    watch.start()
    random_life(engine, 10)
    engine.add("last", [1, 2, 3])
    events = told(watch)
    assert [event["name"] for event in events] == ["sched.state"]
    assert [request["req"] for request in events[0]["args"]["requests"]] == ["last"]
    assert not watch.take()


class FakeClient:
    """The engine core, as far as watching goes."""

    def __init__(self, has_scheduler: bool = True) -> None:
        self.has_scheduler, self.calls = has_scheduler, list[str]()

    async def call(self, method: str, *args: Any) -> bool:
        self.calls.append(method.removesuffix("_scheduler"))
        return self.has_scheduler


def test_the_engine_is_silent_after_the_last_watcher() -> None:
    async def life() -> list[str]:
        client = FakeClient()
        watch = EngineWatch(client)
        first, second = await watch.start(), await watch.start()
        await watch.stop(first)
        watch.publish([b"1"])
        assert first.empty() and second.get_nowait() == [b"1"]
        await watch.stop(second)
        await watch.start()
        return client.calls

    assert asyncio.run(life()) == ["watch", "watch", "unwatch", "watch"]


def test_a_watcher_who_does_not_read_is_let_go_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "MAX_STEPS_BEHIND", 5)

    async def life() -> None:
        watch = EngineWatch(FakeClient())
        asleep, awake = await watch.start(), await watch.start()
        for i in range(20):
            watch.publish([b"%d" % i])
            assert awake.get_nowait() == [b"%d" % i]
            assert asleep.qsize() <= 5
        assert asleep.get_nowait() is None and asleep.empty()
        watch.close()
        assert awake.get_nowait() is None

    asyncio.run(life())


def test_watchers_are_counted_and_an_engine_without_scheduler_says_so() -> None:
    async def life() -> None:
        watch = EngineWatch(FakeClient())
        for _ in range(engine_watch.MAX_WATCHERS):
            await watch.start()
        with pytest.raises(WatchError, match="16 others"):
            await watch.start()
        echo = FakeClient(has_scheduler=False)
        with pytest.raises(WatchError, match="no scheduler"):
            await EngineWatch(echo).start()
        assert echo.calls == ["watch", "unwatch"]

    asyncio.run(life())
