"""Features in a replay: their manifests say what stands for them, so a replay knows none by name."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from toy_engine import STEM, ToyEngine, record

from stage03_engine import plugins
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.async_scheduling.manifest import SCHEDULER
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import ConfigError
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.mixins import load
from stage03_engine.plugins import Feature, Part, loaded
from stage03_engine.replay.recording import RecordedHook
from stage03_engine.replay.replay import replay
from stagetrace import read_run

ROOT = Path(__file__).parent.parent.parent


class NapHook(SchedulerHook):
    """Some requests sleep for some decisions before they may run. How many is drawn at random."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.naps: dict[str, int] = {}

    def added(self, request: Request) -> None:
        if nap := self.nap():
            self.naps[request.request_id] = nap

    def nap(self) -> int:
        return random.SystemRandom().choice([0, 2, 5, 9])

    def traced_params(self, request: Request) -> dict[str, Any]:
        return {"nap": self.naps.get(request.request_id, 0)}

    def holds(self, request: Request) -> bool:
        return request.request_id in self.naps

    def released(self) -> Iterable[str]:
        self.naps = {name: left - 1 for name, left in self.naps.items()}
        awake = [name for name, left in self.naps.items() if left == 0]
        for name in awake:
            del self.naps[name]
        return awake

    def finished(self, request: Request) -> None:
        self.naps.pop(request.request_id, None)


class RecordedNapHook(RecordedHook, NapHook):
    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        self.next: int = params["nap"]

    def nap(self) -> int:
        return self.next


STANDS_IN = Part("replay", f"{__name__}:RecordedNapHook", key="nap")


def napping(directory: Path) -> Path:
    """A recording of an engine with such a hook: without it, its requests run in another order."""

    def life() -> None:
        engine = ToyEngine(1, num_blocks=26, max_num_seqs=4, max_num_batched_tokens=32)
        engine.scheduler.hooks.append(NapHook(engine.scheduler, VllmConfig()))
        for number in range(24):
            engine.add(f"r{number}", [*STEM[:9], number], max_tokens=6, ignore_eos=True)
            engine.step()
        engine.run()

    return record(directory, life)


def test_a_feature_of_somebody_else_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    napping(tmp_path)
    admitted = [event.req for event in read_run(tmp_path).named("sched.admit")]
    assert admitted != sorted(admitted, key=lambda name: int((name or "")[1:]))
    with pytest.raises(ConfigError, match=r"^nap \(the recording uses it\) is not installed$"):
        replay(tmp_path)
    feature = Feature("nap", "lets requests sleep", __name__, parts=(STANDS_IN,))
    monkeypatch.setattr(plugins, "INDEX", (*plugins.INDEX, feature))
    assert [(result.difference, result.requests) for result in replay(tmp_path)] == [(None, 24)]
    monkeypatch.setattr(RecordedNapHook, "nap", lambda self: self.next + (self.next > 2))
    assert replay(tmp_path)[0].difference is not None


def test_hooks_stand_in_the_order_of_their_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is used first: of two that hold a request, the first one is asked."""
    seen: list[list[str]] = []
    schedule = Scheduler.schedule

    def look(self: Scheduler) -> Any:
        seen.append([type(hook).__name__ for hook in self.hooks])
        return schedule(self)

    def life() -> None:
        engine = ToyEngine(1, swap_blocks=4, num_drafts=2)
        engine.scheduler.hooks.append(NapHook(engine.scheduler, VllmConfig()))
        for number in range(8):
            engine.add(f"r{number}", STEM[:9], max_tokens=30, prompt_logprobs=0)
        engine.run()

    record(tmp_path, life)
    first, others = "stage03_engine.core.features.spec_decode", plugins.INDEX
    after = Feature("nap", "lets requests sleep", __name__, parts=(STANDS_IN,), after=("spec_decode",))
    monkeypatch.setattr(plugins, "INDEX", (after, first, *(room for room in others if room != first)))
    monkeypatch.setattr(Scheduler, "schedule", look)
    assert replay(tmp_path)[0].difference is None
    whole = ["RecordedSwapHook", "RecordedDraftHook", "RecordedNapHook", "RecordedPromptLogprobsHook"]
    assert seen[-1] == whole and all(hooks == [name for name in whole if name in hooks] for hooks in seen)


@pytest.mark.parametrize("name", ["stage03_engine.gone:Scheduler", "gone_from_here:Scheduler"])
def test_a_scheduler_that_is_not_there(name: str, tmp_path: Path) -> None:
    """One of this repository is missed; one of a user's own is compared with the reference."""
    folder = record(tmp_path, lambda: ToyEngine(1, scheduler_cls=name).run())
    if name.startswith("stage03_engine."):
        with pytest.raises(ConfigError, match=r"gone:Scheduler \(the recording uses it\) is not installed"):
            replay(folder)
    else:
        assert replay(folder)[0].difference is None


NEEDS_NONE = {
    "PoolSizeHook": "a request that it refuses is never queued",
    "CheckInvariantsHook": "it looks at the state after a step, and changes nothing",
    "PromptEmbedsSchedulerHook": "the hashes of blocks are recorded, and a request that it refuses is never queued",
    "SleepSchedulerHook": "a request that it refuses is never queued",
    "WeightsSchedulerHook": "a request that it refuses is never queued",
    "ProfilerHook": "it overrides nothing that a decision is made of",
}
"""Hooks that need nothing in a replay -> why."""


def all_hooks() -> set[type[SchedulerHook]]:
    """Every scheduler hook of the rooms: subclasses, once all modules that name the class are imported."""
    for path in sorted(ROOT.glob("stage0*/**/*.py")):
        if "SchedulerHook" in path.read_text(encoding="utf-8"):
            load(".".join(path.relative_to(ROOT).with_suffix("").parts) + ":__name__")

    def below(kind: type[SchedulerHook]) -> set[type[SchedulerHook]]:
        return {each for child in kind.__subclasses__() for each in {child, *below(child)}}

    return {kind for kind in below(SchedulerHook) if kind.__module__.startswith("stage0")}


def stand_ins() -> list[type]:
    return [kind for key in plugins.keys("replay") for kind in loaded("replay", key)]


def test_every_hook_that_changes_decisions_has_a_stand_in() -> None:
    hooks = {kind for kind in all_hooks() if not issubclass(kind, RecordedHook)}
    assert len(hooks) >= 9
    missing = {
        kind.__name__ for kind in hooks if not kind.observes and not any(issubclass(each, kind) for each in stand_ins())
    }
    assert missing == NEEDS_NONE.keys()
    profiler = next(kind for kind in hooks if kind.__name__ == "ProfilerHook")
    assert not [name for name in vars(SchedulerHook) if name in vars(profiler) and not name.startswith("__")]


def test_every_stand_in_is_one_that_a_replay_can_use() -> None:
    kinds = stand_ins()
    assert load(SCHEDULER) in kinds
    assert all(issubclass(kind, (RecordedHook, Scheduler)) for kind in kinds)
    for part in plugins.keys("replay").values():
        assert not issubclass(part.load(), Scheduler) or part.key == part.name


def test_the_replay_imports_no_feature() -> None:
    for path in (ROOT / "stage03_engine/replay").glob("*.py"):
        assert "stage03_engine.core.features" not in path.read_text(encoding="utf-8"), path
