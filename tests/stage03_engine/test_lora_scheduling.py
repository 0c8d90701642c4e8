"""Places for adapters, decided by the scheduler's hook: no model and no files."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_engine import STEM, AsyncToyEngine, ToyEngine, record

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.lora.manifest import LoRAConfig
from stage03_engine.core.features.lora.messages import CHANGES, REPORT, Report, adapter_of
from stage03_engine.core.features.lora.recorded_lora import RecordedLoRAHook
from stage03_engine.core.features.lora.scheduler_hook import Known, LoRASchedulerHook
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.messages import FinishReason
from stage03_engine.replay.replay import replay
from stagetrace import read_run


class Engine(ToyEngine):
    """A toy engine with adapters 1 to 6, whose files vanish now and then."""

    failures = 0.0

    def __init__(self, seed: int = 0, max_loras: int = 2, **settings: Any) -> None:
        super().__init__(seed, **settings)
        config = replace(VllmConfig(), lora_config=LoRAConfig(max_loras=max_loras))
        self.hook = LoRASchedulerHook(self.scheduler, config)
        self.hook.known = {number: Known(f"a{number}", "") for number in range(1, 7)}
        self.scheduler.hooks.append(self.hook)
        self.outputs: list[Any] = []
        self.removed: list[int] = []

    def ask(self, name: str, adapter: int = 0, prompt: int = 9, **more: Any) -> None:
        given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True} | more
        if adapter:
            given |= {"lora": f"a{adapter}", "lora_int_id": adapter}
        self.add(name, [*STEM[:prompt], len(name)], **given)

    def _begin(self) -> SchedulerOutput:
        output = super()._begin()
        self.hook.check_invariants()
        used = {adapter_of(self.scheduler.requests[i].sampling_params) for i in output.num_scheduled_tokens} - {0}
        assert len(used) <= self.hook.max_loras
        if (changes := CHANGES.of(output.extras)) is not None:
            assert not used & {*changes.remove}, "a step uses what it removes"
            self.removed += changes.remove
        return output

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        answer = super()._execute(output)
        used = {adapter_of(self._computed(i, output.step)[0].sampling_params) for i in output.num_scheduled_tokens} - {
            0
        }
        if used and self.rng.random() < self.failures:
            REPORT.put(answer.extras, Report({min(used): "gone"}))
        return answer

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]


class AsyncEngine(Engine, AsyncToyEngine):
    """The same with overlapping steps."""


def life(engine: Engine) -> None:
    """Requests of all kinds, adapters that are pinned, removed, and cannot be read."""
    rng = engine.rng
    for number in range(60):
        adapter = rng.choice([0, 1, 1, 2, 3, 4, 5, 6])
        if adapter in engine.hook.known or not adapter:
            engine.ask(
                f"r{number}", adapter, rng.choice([3, 9, 30]), max_tokens=rng.randint(1, 20), temperature=0,
                structured_outputs=None,
            )  # fmt: skip
        for _ in range(rng.choice([0, 0, 1, 3])):
            if not engine.is_idle:
                engine.step()
        if rng.random() < 0.1:
            engine.scheduler.finish_requests([f"r{rng.randint(0, number)}"])
        if rng.random() < 0.05:
            try:
                engine.hook.pin(rng.randint(1, 6))
            except ConfigError:
                engine.hook.remove(next(iter(engine.hook.pinned), 0))
        if rng.random() < 0.03:
            engine.hook.remove(rng.randint(1, 6))
    engine.run()


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("seed", range(4))
def test_any_life_ends_and_is_decided_again(
    kind: type[Engine], policy: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes, ends; no step has more adapters than places; a replay decides the same."""
    engines = []

    def lives() -> None:
        blocks = random.Random(seed).choice([26, 60])
        engines.append(kind(seed, 1 + seed % 3, num_blocks=blocks, scheduling_policy=policy, max_num_seqs=4))
        engines[0].failures = 0.05
        life(engines[0])

    record(tmp_path, lives)
    [engine] = engines
    assert not engine.hook.places.keys() - engine.hook.pinned and not engine.hook.waiting
    assert not engine.hook._leaving, "a removed adapter was kept"
    run = read_run(tmp_path)
    assert run.named("lora.waiting") and run.named("lora.failed")
    assert [result.difference for result in replay(tmp_path)] == [None]
    if engine.hook.max_loras == 1:  # with more places nobody may have had to wait for long
        monkeypatch.setattr(RecordedLoRAHook, "before_arrival", lambda self, message, params: None)
        assert replay(tmp_path)[0].difference is not None, "without its hook a replay decides otherwise"


def test_others_overtake_who_waits_for_a_place(tmp_path: Path) -> None:
    def life() -> None:
        engine = Engine(max_loras=1)
        engine.ask("first", 1)
        engine.ask("other", 2)
        engine.ask("base")
        engine.ask("first again", 1)
        engine.step()
        assert engine.running == ["first", "base", "first again"]
        engine.run()

    [waiting] = read_run(record(tmp_path, life)).named("lora.waiting")
    assert waiting.req == "other" and waiting.args == {"adapter": "a2", "holders": {"1": ["first"]}}


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_place_closes_when_too_many_have_overtaken(policy: str) -> None:
    """A stream of requests for one adapter does not keep the place for ever."""
    engine = Engine(max_loras=1, max_num_seqs=4, scheduling_policy=policy)
    engine.ask("a", 1, max_tokens=8)
    engine.ask("other", 2)
    for number in range(40):
        engine.ask(f"more {number}", 1, max_tokens=8)
        engine.step()
        if "other" in engine.running:
            break
    assert "other" in engine.running, "it starves"
    waiting = [request.request_id for request in engine.hook.waiting[1].values()]
    assert waiting and f"more {number}" in waiting
    engine.run()


def test_a_place_that_closed_opens_again_when_nobody_else_wants_it() -> None:
    engine = Engine(max_loras=1, max_num_seqs=2)
    engine.ask("a", 1, max_tokens=30)
    engine.ask("other", 2)
    while 1 not in engine.hook.waiting:
        engine.ask(f"more {engine.scheduler.step}", 1, max_tokens=2)
        engine.step()
    engine.scheduler.finish_requests(["other"])
    engine.step()
    assert not engine.hook.waiting and 1 in engine.hook.places
    engine.run()


def test_a_free_place_is_worth_a_step() -> None:
    """Also where another hook sees that all requests are held back, and nothing to run."""
    engine = Engine(max_loras=1)
    engine.ask("first", 1)
    engine.ask("second", 2)
    assert engine.hook.poll() == ([], None)
    engine.scheduler.finish_requests(["first"])
    assert engine.scheduler.held and engine.hook.poll() == ([], True)


def test_whose_turn_it_is() -> None:
    """Of several that wait, the one that came first; under the priority policy the most urgent one."""
    for policy, expected in (("fcfs", "second"), ("priority", "third")):
        engine = Engine(max_loras=1, scheduling_policy=policy)
        engine.ask("first", 1, max_tokens=2)
        for name, adapter, priority in (("second", 2, 0), ("third", 3, -1)):
            engine.add(name, STEM[:5], priority, lora=f"a{adapter}", lora_int_id=adapter, max_tokens=2, ignore_eos=True)
        while "first" in engine.scheduler.requests:
            engine.step()
        engine.step()
        assert engine.running == [expected]


def test_a_preempted_request_keeps_its_place() -> None:
    engine = Engine(max_loras=1, num_blocks=12, caching=False)
    engine.ask("base", 0, 9, max_tokens=30)
    engine.ask("mine", 1, 9, max_tokens=20)
    while not engine.scheduler.stats.num_preemptions:
        engine.step()
    engine.ask("other", 2)
    assert "other" in engine.scheduler.held and engine.hook.places == {1: {"mine"}}
    engine.run()


def test_a_removed_adapter_stays_until_its_last_request_has_ended() -> None:
    engine = Engine()
    engine.ask("mine", 1, max_tokens=6)
    engine.step()
    assert engine.hook.remove(1) and not engine.hook.remove(1)
    engine.ask(
        "late", 1, max_tokens=9
    )  # the front end had sent it before: the seventeenth of several answers, for instance
    while "late" in engine.scheduler.requests:
        engine.step()
        assert not engine.removed
    with pytest.raises(InvalidRequestError, match="the adapter 'a1' is not loaded"):
        engine.ask("too late", 1)
    engine.ask("base")
    engine.step()
    assert engine.removed == [1]


def test_pinned_adapters_keep_their_place() -> None:
    engine = Engine(max_loras=2)
    assert engine.hook.pin(1) and not engine.hook.pin(9)
    with pytest.raises(ConfigError, match="pinning 'a2' leaves no place for other adapters; --max-loras is 2"):
        engine.hook.pin(2)
    engine.ask("one", 1)
    engine.run()
    for adapter in (2, 3):
        engine.ask(str(adapter), adapter)
    engine.step()
    assert engine.running == ["2"] and engine.hook.places.keys() == {1, 2}
    engine.run()


def test_blocks_are_those_of_one_load() -> None:
    """Under the same name other weights may be loaded; and blocks of requests that failed were computed without the adapter."""

    def hits(change: Callable[[Engine], object], adapter: int = 1) -> int:
        engine = Engine(num_blocks=64)
        engine.ask("first", 1, 40)
        engine.run()
        change(engine)
        before = engine.scheduler.stats.prefix_cache_hits
        engine.ask("second", adapter, 40)
        engine.run()
        return engine.scheduler.stats.prefix_cache_hits - before

    def loaded_again(engine: Engine) -> None:
        engine.hook.known[7] = Known("a1", "")

    def failed(engine: Engine) -> None:
        engine.failures = 1.0
        engine.ask("third", 1, 40)
        engine.step()
        engine.failures = 0.0

    assert hits(lambda engine: None) == 40
    assert hits(loaded_again, adapter=7) == 0
    assert hits(failed) == 0


def test_an_adapter_that_is_pinned_while_its_place_is_closed_goes_on() -> None:
    """Else nobody could close another place, and its own new requests would wait for ever."""
    engine = Engine(max_loras=2)
    engine.ask("one", 1, max_tokens=30)
    engine.ask("two", 2, max_tokens=30)
    engine.step()
    engine.ask("third", 3)
    number = 0
    while engine.hook._closed is None:
        engine.ask(f"overtakes{(number := number + 1)}", 1, max_tokens=1)
        engine.step()
    closed = engine.hook._closed
    assert engine.hook.pin(closed)
    engine.ask("again", closed)
    for number in range(200):
        if not {"again", "third"} & engine.scheduler.requests.keys():
            break
        engine.ask(f"later{number}", 3 - closed, max_tokens=1)
        engine.step()
    else:
        pytest.fail("two adapters starve")


def test_blocks_of_a_step_whose_requests_left_are_not_found_again() -> None:
    """Its adapter could not be read, and the step's requests ended before that was known."""
    engine = Engine()
    engine.ask("mine", 1, 40)
    output = engine._begin()
    engine.scheduler.finish_requests(["mine"], FinishReason.ABORT)
    answer = ModelRunnerOutput({})
    REPORT.put(answer.extras, Report({1: "gone"}))
    engine.hook.executed(output, answer)
    assert engine.hook.known[1].failures == 1
