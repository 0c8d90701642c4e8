"""Hooks that hold requests back (`SchedulerHook.holds` until `released`): found by reflection, so a new one is held to the contract too.

Each lives beside another hook that holds the same requests for a while, before it and after it in the order of hooks, and all live together. Requests arrive, are
aborted, are preempted and end at random. What is watched:

- whoever is held runs in no step before it is released, whatever another hook releases meanwhile;
- a hook that holds a request says so until it names it, and names only those that are held;
- in the end every block is free, and no hook keeps anything of a request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from toy_engine import ANY_JSON, STEM, AsyncToyEngine, PipelineToyEngine, RandomGrammars, ToyEngine

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.kv_transfer import connector
from stage03_engine.core.features.kv_transfer.base import NOTHING, FullBlock, KVConnectorScheduler, Match, Transfers
from stage03_engine.core.features.kv_transfer.connector import TRANSFERS, WRITTEN, KVConnectorHook, Written
from stage03_engine.core.features.kv_transfer.connectors import parse_kv_transfer_config
from stage03_engine.core.features.kv_transfer.manifest import KVTransferConfig
from stage03_engine.core.features.lora.manifest import LoRAConfig
from stage03_engine.core.features.lora.scheduler_hook import Known, LoRASchedulerHook
from stage03_engine.core.features.structured_output.scheduler_hook import GrammarSchedulerHook
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.plugins import features
from stage03_engine.replay.recording import RecordedHook

ROOT = Path(__file__).parents[2]
rng = random.Random()


def holding_hooks() -> list[type[SchedulerHook]]:
    """All of the engine, in the order of their features; those that stand for one in a replay are told what it did."""
    for path in sorted((ROOT / "stage03_engine").rglob("*.py")):
        if "def holds(" in path.read_text(encoding="utf-8"):
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found, left = list[type[SchedulerHook]](), [SchedulerHook]
    while left:
        left += (kind := left.pop()).__subclasses__()
        ours = kind.__module__.startswith("stage03_engine.") and not issubclass(kind, RecordedHook)
        if ours and kind.holds is not SchedulerHook.holds:
            found.append(kind)
    rooms = [feature.room for feature in features()]
    return sorted(found, key=lambda kind: next(i for i, room in enumerate(rooms) if kind.__module__.startswith(room)))


class LateConnector(KVConnectorScheduler):
    """Answers late, and lets go of what it saves late. What it promises is less than a prompt."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.open: list[Future[None]] = []

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, may_wait: bool
    ) -> Match | Future[None]:
        if rng.random() < 0.6:
            self.open.append(Future())
            return self.open[-1]
        blocks = (request.num_tokens - 1 - num_computed_tokens) // self.block_size
        return Match(num_computed_tokens, rng.randint(0, blocks) * self.block_size) if blocks > 0 else NOTHING

    def answer_some(self) -> None:
        for answer in self.open[::2]:
            answer.set_result(None)
        del self.open[::2]

    def build_connector_meta(self, full: Any, room: int) -> Transfers:
        new: list[FullBlock] = list(full)[:room]
        return Transfers([], [(each.block, each.block_hash, -1) for each in new])


def a_connector(scheduler: Scheduler) -> SchedulerHook:
    given = {"kv_connector": "Late", "kv_connector_module_path": __name__, "kv_connector_extra_config": {}}
    limits = KVTransferConfig(**parse_kv_transfer_config(given) | {"scheduler_side": f"{__name__}:LateConnector"})
    return KVConnectorHook(scheduler, replace(VllmConfig(), kv_transfer_config=limits))


def adapters(scheduler: Scheduler) -> SchedulerHook:
    hook = LoRASchedulerHook(scheduler, replace(VllmConfig(), lora_config=LoRAConfig(max_loras=1)))
    hook.known = {number: Known(f"a{number}", "") for number in range(1, 4)}
    return hook


def grammars(scheduler: Scheduler) -> SchedulerHook:
    manager = RandomGrammars(rng)
    manager.late_rate, manager.end_rate = 0.7, 0.0
    return GrammarSchedulerHook(scheduler, VllmConfig(), manager)


def an_adapter() -> dict[str, Any]:
    number = rng.randint(1, 3)
    return {"lora": f"a{number}", "lora_int_id": number}


MADE: dict[str, tuple[Callable[[Scheduler], SchedulerHook], Callable[[], dict[str, Any]]]] = {
    "GrammarSchedulerHook": (grammars, lambda: {"structured_outputs": ANY_JSON}),
    "KVConnectorHook": (a_connector, dict),
    "LoRASchedulerHook": (adapters, an_adapter),
}
"""Hook -> how it is made without a model, and what a request asks of it. A hook that is not here is made as the engine makes it, for plain requests."""

IMPOSSIBLE = {("LoRASchedulerHook", "preempted"): "a preempted request keeps its place"}
SEEN = ("held", "preempted", "aborted", "another let go", "released")


class Other(SchedulerHook):
    """Holds any request, whenever it is to wait, and lets it go some decisions later."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.naps: dict[str, int] = {}

    def holds(self, request: Request) -> bool:
        if self.naps.get(request.request_id) == 0:  # it was let go just now
            return False
        return request.request_id in self.naps or (rng.random() < 0.5 and self._nap(request))

    def _nap(self, request: Request) -> bool:
        self.naps[request.request_id] = rng.randint(1, 4)
        return True

    def released(self) -> Iterable[str]:
        self.naps = {name: left - 1 for name, left in self.naps.items() if left}
        return [name for name, left in self.naps.items() if not left]

    def finished(self, request: Request) -> None:
        self.naps.pop(request.request_id, None)


class Watch:
    """Beside a hook: whom it holds, by its own words."""

    letting_go: tuple[SchedulerHook, str] | None = None  # of all hooks: who names whom, and is asked about right now

    def __init__(self, hook: SchedulerHook, seen: Counter[str]) -> None:
        self.hook, self.seen, self.held = hook, seen, set[str]()
        self.ask, self.take = hook.holds, hook.released
        hook.holds, hook.released = self.holds, self.released  # type: ignore[method-assign]

    def holds(self, request: Request) -> bool:
        name, answer = request.request_id, self.ask(request)
        assert answer or name not in self.held, f"{type(self.hook).__name__} lets go of {name}, which it has not named"
        if answer:
            self.held.add(name)
            self.seen["preempted" if request.status == RequestStatus.PREEMPTED else "held"] += 1
            who = Watch.letting_go
            self.seen["another let go"] += who is not None and who[0] is not self.hook and who[1] == name
        return answer

    def released(self) -> Iterable[str]:
        for name in list(self.take()):
            assert name in self.hook.scheduler.held, f"{type(self.hook).__name__} names {name}, which nobody holds"
            self.held.discard(name)
            self.seen["released"] += 1
            Watch.letting_go = self.hook, name
            yield name  # the others are asked now
            Watch.letting_go = None


def with_hooks(kind: type[ToyEngine], seed: int, hooks: list[Callable[[Scheduler], SchedulerHook]]) -> ToyEngine:
    """An engine with few blocks."""
    engine = kind(seed, num_blocks=18, max_num_seqs=4, max_num_batched_tokens=32)
    keep = [each for each in engine.scheduler.hooks if not isinstance(each, GrammarSchedulerHook)]
    engine.scheduler.hooks = [*(make(engine.scheduler) for make in hooks), *keep]
    return engine


class Life:
    """Of an engine with some of the hooks."""

    def __init__(self, kind: type[ToyEngine], seed: int, kinds: list[type[SchedulerHook]], before: bool) -> None:
        rng.seed(seed)
        names = [each.__name__ for each in kinds]
        made = [MADE[name][0] if name in MADE else _as_the_engine(each) for name, each in zip(names, kinds)]
        self.wants = [MADE[name][1] if name in MADE else dict for name in names]
        hooks: list[Any] = [_as_the_engine(Other), *made] if before else [*made, _as_the_engine(Other)]
        self.engine = with_hooks(kind, seed, hooks)
        self.seen: dict[str, Counter[str]] = {name: Counter() for name in names}
        self.watches = [
            Watch(hook, self.seen.setdefault(type(hook).__name__, Counter())) for hook in self.engine.scheduler.hooks
        ]
        self._look_at_steps()

    def _look_at_steps(self) -> None:
        engine, begin, execute = self.engine, self.engine._begin, self.engine._execute
        saved: list[int] = []

        def decided() -> SchedulerOutput:
            for hook in engine.scheduler.hooks:
                if isinstance(known := getattr(hook, "connector", None), LateConnector):
                    known.answer_some()
            output = begin()
            for watch in self.watches:
                early = watch.held & output.num_scheduled_tokens.keys()
                assert not early, f"{early} run, and {type(watch.hook).__name__} holds them"
            check_invariants(engine.scheduler)
            return output

        def executed(output: SchedulerOutput) -> ModelRunnerOutput:
            answer = execute(output)
            saved.extend(block for block, *_ in (TRANSFERS.of(output.extras) or Transfers()).saves)
            count = len(saved) if len(engine.scheduler.requests) < 2 else rng.randint(0, len(saved))
            if saved[:count]:
                WRITTEN.put(answer.extras, Written(saved[:count]))
            del saved[:count]
            return answer

        engine._begin, engine._execute = decided, executed  # type: ignore[method-assign]

    def run(self) -> None:
        engine = self.engine
        for number in range(40):
            wanted: dict[str, Any] = {}
            for want in self.wants:
                wanted |= want() if rng.random() < 0.8 else {}
            prompt = [*STEM[: rng.choice([3, 9, 17])], number]
            engine.add(f"r{number}", prompt, max_tokens=rng.randint(4, 24), ignore_eos=True, **wanted)
            for _ in range(rng.choice([0, 0, 1, 3])):
                if not engine.is_idle:
                    engine.step()
            if rng.random() < 0.3:
                self.abort(f"r{rng.randint(max(0, number - 6), number)}")
        engine.run()

    def abort(self, name: str) -> None:
        for watch in self.watches:
            watch.seen["aborted"] += name in watch.held
            watch.held.discard(name)
        self.engine.scheduler.finish_requests([name])
        check_invariants(self.engine.scheduler)

    def check_end(self) -> None:
        scheduler = self.engine.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.num_free == pool.num_usable, "blocks are lost"
        assert not scheduler.held and not scheduler.requests
        for hook in scheduler.hooks:
            for name, value in vars(hook).items():
                assert not (left := kept(value)), f"{type(hook).__name__}.{name} keeps {left}"


def _as_the_engine(kind: type[SchedulerHook]) -> Callable[[Scheduler], SchedulerHook]:
    return lambda scheduler: kind(scheduler, VllmConfig())


def kept(value: Any) -> list[str]:
    """Requests in a collection, and in those inside of it."""
    if isinstance(value, Request):
        return [value.request_id]
    if isinstance(value, str):
        return [value] if value[:1] == "r" and value[1:].isdecimal() else []
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [name for each in value for name in kept(each)] if isinstance(value, list | set) else []


KINDS = holding_hooks()
SETS = [*([kind] for kind in KINDS), KINDS]


def test_the_engine_has_such_hooks() -> None:
    assert MADE.keys() <= {kind.__name__ for kind in KINDS}, "a hook in MADE is gone"


@pytest.mark.parametrize("before", [True, False], ids=["after another", "before another"])
@pytest.mark.parametrize("engine", [ToyEngine, AsyncToyEngine, PipelineToyEngine])
@pytest.mark.parametrize("kinds", SETS, ids=lambda kinds: "+".join(kind.__name__ for kind in kinds))
@pytest.mark.slow(keep=("Hook-ToyEngine-after another", "Hook-PipelineToyEngine-before another"))
def test_nothing_runs_before_it_is_released_and_nothing_is_left(
    kinds: list[type[SchedulerHook]], engine: type[ToyEngine], before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "WAIT_SECONDS", 0.0)
    for seed in range(12):
        life = Life(engine, seed, kinds, before)
        life.run()
        life.check_end()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_all_of_it_has_happened_to_each(kind: type[SchedulerHook], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above shows nothing: add how such a hook is made, and what a request asks of it, to MADE."""
    monkeypatch.setattr(connector, "WAIT_SECONDS", 0.0)
    seen = Counter[str]()
    for seed in range(8):
        life = Life(ToyEngine, seed, [kind], before=True)
        life.run()
        seen.update(life.seen[kind.__name__])
    missing = [what for what in SEEN if not seen[what] and (kind.__name__, what) not in IMPOSSIBLE]
    assert not missing, f"{kind.__name__}: {missing} never happened"
