"""Fewer compute threads while other programs need the cores, and more again: the rule, the measuring, and that no number changes."""

from __future__ import annotations

import itertools
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from patience import PATIENCE
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.adaptive_threads import hook, policy as rule, room
from stage03_engine.core.features.adaptive_threads.policy import (
    MOST_LATENESS,
    WAITS,
    ThreadPolicy,
    Window,
)
from stage03_engine.core.features.adaptive_threads.room import busy_seconds
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.native import library
from stage04_kernels.backends.native.library import limit_threads
from stagetrace import read_run

HOOK = "stage03_engine.core.features.adaptive_threads.hook:AdaptiveThreadsHook"
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}
NATIVE = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [list(range(5, 45)), [7, 8, 9], [40] * 17]
ON_TIME, LATE = 1.0, 2.6
STEP = 1 / 32  # seconds of a step that is on time


def steps(policy: ThreadPolicy, lateness: float, count: int = 1, room: float | None = None) -> list[int]:
    return [policy.decide(Window(lateness * STEP, STEP), room) for _ in range(count)]


def test_threads_that_are_on_time_stay() -> None:
    assert {each for late in [ON_TIME, 1.5] * 200 for each in steps(ThreadPolicy(4), late)} == {4}


def test_the_first_long_step_that_is_late_halves_them() -> None:
    policy = ThreadPolicy(8)
    assert steps(policy, LATE) == [4] and policy.why == "late" and policy.trying and policy.late == LATE
    assert steps(policy, LATE, 12) == [4] * 4 + [2] * 5 + [1] * 3  # a trial is four steps
    assert steps(ThreadPolicy(3), LATE) == [1]
    assert Window(1.0, 0.0).lateness == 1.0  # no processor time at all is late


def test_short_steps_add_up_and_those_on_time_pay_off() -> None:
    late, on_time = Window(0.004, 0.002), Window(0.002, 0.002)
    policy = ThreadPolicy(2)
    assert [policy.decide(late) for _ in range(22)] == [2] * 21 + [1]
    policy = ThreadPolicy(2)
    assert {policy.decide(each) for _ in range(200) for each in [late, *[on_time] * 4]} == {2}


def test_a_try_that_is_late_makes_the_next_one_wait_twice_as_long() -> None:
    policy = ThreadPolicy(2)
    steps(policy, LATE)
    waits = []
    for _ in range(7):
        waits.append(0.0)
        while steps(policy, ON_TIME) == [1]:
            waits[-1] += STEP
        assert policy.trying and policy.why == "a try"
        assert steps(policy, LATE) == [1] and not policy.trying and policy.why == "late again"
    shortest, longest = WAITS[None]
    assert waits == pytest.approx([shortest * 2**n for n in range(5)] + [longest] * 2, abs=4 * STEP)


def test_free_cores_are_taken_at_once_and_cores_that_are_not_free_hardly_ever() -> None:
    policy = ThreadPolicy(8)
    steps(policy, LATE, 11)
    assert policy.threads == 1
    assert set(steps(policy, ON_TIME, int(6 / STEP), room=1.2)) == {1}
    found = next(each for each in (steps(policy, LATE, room=4.7) for _ in range(int(0.6 / STEP))) if each != [1])
    assert found == [5] and policy.why == "free cores"  # late or not: the cores are there
    policy = ThreadPolicy(2)
    steps(policy, LATE)
    tries = 0
    for _ in range(int(600 / (LATE * STEP))):
        tries += steps(policy, LATE, room=0.5) == [2]
    assert tries <= 9  # 6, 13, 26, 51, then each 102 seconds


def test_free_cores_must_be_free_for_a_while() -> None:
    policy = ThreadPolicy(2)
    steps(policy, LATE)
    assert {each for room in [2.0, 0.9] * 9 for each in steps(policy, ON_TIME, 10, room)} == {1}


def test_a_trial_that_is_on_time_stays_and_the_next_core_is_tried_soon() -> None:
    policy = ThreadPolicy(4)
    steps(policy, LATE, 6)
    assert policy.threads == 1
    assert steps(policy, ON_TIME, int(20 / STEP))[-1] == 4
    assert policy._waits == {free: shortest for free, (shortest, _) in WAITS.items()}  # forgiven


def test_fewer_threads_that_are_slower_go_back_and_are_tried_ever_more_rarely() -> None:
    """Late, and the best there is: the server's other processes have the cores for a moment, again and again."""
    policy, tries, one = ThreadPolicy(2), list[int](), 0
    for number in range(10_000):
        two = policy.threads == 2
        if policy.decide(Window(1.6 * STEP if two else 2.2 * STEP, STEP if two else 2.1 * STEP), 2.0) == 1:
            tries += [number] * two
            one += 1
    between = [later - before for before, later in itertools.pairwise(tries)]
    assert between[:3] == sorted(between[:3]) and between[-1] >= MOST_LATENESS / (0.3 * STEP)
    assert one < 0.05 * 10_000 and policy._borne == MOST_LATENESS
    steps(policy, ON_TIME, int(8 * MOST_LATENESS / STEP))
    assert steps(policy, LATE) == [1]  # forgiven


def test_a_trial_that_is_late_and_faster_stays() -> None:
    policy = ThreadPolicy(2)
    steps(policy, LATE)
    while policy.threads == 1:
        steps(policy, ON_TIME)
    assert [policy.decide(Window(0.8 * STEP, 0.4 * STEP)) for _ in range(4)] == [2] * 4 and not policy.trying


def test_steps_of_another_size_say_nothing() -> None:
    one = Window(1.0, 1.0, steps=4, tokens=4)
    assert [Window(each, 1.0, 4, 4).compared(one) for each in (0.9, 0.97, 1.03, 1.2)] == [1, 0, 0, -1]
    assert [Window(9.0, 1.0, steps, tokens).compared(one) for steps, tokens in ((4, 128), (8, 8), (1, 2))] == [0, -1, 0]


def test_nothing_is_tried_while_even_one_thread_is_late() -> None:
    policy = ThreadPolicy(2)
    assert steps(policy, LATE, 2000) == [1] * 2000
    assert not policy.trying


@given(st.integers(1, 16), st.lists(st.tuples(st.floats(0.9, 9.0), st.none() | st.floats(-1.0, 20.0)), max_size=300))
def test_there_is_always_a_thread_and_never_one_too_many(most: int, found: list[tuple[float, float | None]]) -> None:
    policy = ThreadPolicy(most)
    for lateness, free in found:
        before = policy.threads
        (threads,) = steps(policy, lateness, room=free)
        assert 1 <= threads <= most
        assert threads <= max(before + 1, (free or 0) + 1) or policy.why == "slower"


class Machine:
    """A simulation: cores that busy loops share with the threads of a step, in turns of some milliseconds. A thread whose turn is over waits for one of each other
    program on its core; the thread that calls spins, which is processor time, until the last one is done.
    """

    TURN, PRODUCTS = 0.003, 8

    def __init__(self, cores: int, work: float, seed: int, *, sees: bool) -> None:
        self.cores, self.work, self.loops, self.now = cores, work, 0, 0.0
        self.random, self.sees = random.Random(seed), sees
        self.policy = ThreadPolicy(cores)

    def wait(self, busy: float, threads: int) -> float:
        """Seconds that a thread which needs so much processor time does not get it."""
        others = max(0.0, (self.loops + threads) / self.cores - 1)
        turns = int(busy / self.TURN) + (self.random.random() < busy / self.TURN % 1)
        return self.TURN * sum(self.random.uniform(0.5, 1.5) * others for _ in range(turns))

    def step(self) -> Window:
        """One step, as long as it takes."""
        threads, seconds, busy = self.policy.threads, 0.0, 0.0
        own = self.work / self.PRODUCTS / threads * self.random.uniform(1.0, 1.05)
        for _ in range(self.PRODUCTS):
            ends = [own + self.wait(own, threads) for _ in range(threads)]
            spins = max(0.0, max(ends) - ends[0])
            spins_late = self.wait(spins, threads)
            seconds += max(max(ends), ends[0] + spins_late)
            busy += own + max(0.0, spins - spins_late)
        return Window(seconds, busy)

    def room(self) -> float | None:
        """What is measured, about as well as the system counts."""
        runs = self.loops + self.policy.threads
        others = self.loops * min(1.0, self.cores / runs)
        return self.cores - others + self.random.uniform(-0.15, 0.15) if self.sees else None

    def run(self, loops: int, seconds: float) -> list[tuple[float, int]]:
        """(seconds since the loops began or ended, threads of the next steps), each time that it changes."""
        self.loops, start, before, changes = loops, self.now, self.policy.threads, []
        while self.now - start < seconds:
            step = self.step()
            self.now += step.seconds
            if self.policy.decide(step, self.room()) != before:
                changes.append((self.now - start, self.policy.threads))
                before = self.policy.threads
        return changes


@settings(max_examples=8)
@given(
    st.sampled_from([(2, 2), (2, 4), (2, 6), (4, 8)]), st.sampled_from([0.01, 0.03]), st.integers(0, 99), st.booleans()
)
def test_a_load_is_noticed_at_once_and_its_end_soon(found: tuple[int, int], work: float, seed: int, sees: bool) -> None:
    """Every core has a busy loop or more."""
    cores, loops = found
    machine = Machine(cores, work, seed, sees=sees)
    assert machine.run(0, 2.0) == []
    changes = machine.run(loops, 8.0)
    assert next(when for when, threads in changes if threads == 1) < 0.25 * cores / 2 + 4 * work
    assert len(changes) <= cores + 2
    at_one = [after - when for (when, n), (after, _) in itertools.pairwise([*changes, (8.0, 0)]) if n == 1]
    assert sum(at_one) > 0.9 * 8.0
    back = machine.run(0, 6.0)
    assert machine.policy.threads == cores and back[-1][0] < 2.0


@settings(max_examples=6)
@given(st.sampled_from([0.01, 0.03]), st.integers(0, 99), st.floats(0.3, 5.0))
def test_a_load_that_comes_and_goes_does_not_make_it_flap(work: float, seed: int, each: float) -> None:
    """As often as it changes itself, at most, and a few times more."""
    machine, turns = Machine(2, work, seed, sees=True), int(30 / each)
    changes = sum(len(machine.run(2 * (turn % 2), each)) for turn in range(turns))
    assert changes <= min(turns + 4, 30)


def config(**settings: Any) -> Any:
    return EngineArgs.from_kwargs(**{"model": "gpt2-tiny", "attention_backend": "native"} | SMALL | settings)


@NATIVE
def test_it_is_on_until_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage03_engine.args.features.cores.cores.count_physical", lambda *_: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert config().device_config.num_threads == 4
    on: list[dict[str, Any]] = [{}, {"linear_backend": "native"}, {"adaptive_threads": True, "num_threads": 3}]
    off: list[dict[str, Any]] = [
        {"num_threads": 4}, {"adaptive_threads": False}, {"adaptive_threads": True, "num_threads": 1},
        {"attention_backend": "torch"}, {"linear_backend": "torch"}, {"linear_backend": "onednn"}, {"tensor_parallel_size": 2},
    ]  # fmt: skip
    assert [HOOK in config(**each).hooks("runner") for each in on] == [True] * len(on)
    assert [HOOK in config(**each).hooks("runner") for each in off] == [False] * len(off)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert HOOK not in config().hooks("runner")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_layers(tmp_path_factory.mktemp("threads") / "model", 2))


@pytest.fixture
def no_limit() -> Iterator[None]:
    yield
    limit_threads(None)


@NATIVE
@pytest.mark.parametrize(
    "more", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}],
    ids=["float32", "bfloat16", "int8", "int4", "cache of 8 bits"],
)  # fmt: skip
@pytest.mark.usefixtures("no_limit")
def test_how_many_threads_there_are_shows_in_no_bit(model: Path, more: dict[str, Any]) -> None:
    with LLM(str(model), num_threads=3, enable_prefix_caching=False, attention_backend="native", **SMALL | more) as llm:
        found = []
        for most in (None, 2, 1):
            limit_threads(most)
            outputs = llm.generate(PROMPTS, [GREEDY, GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=9)])
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[1] == found[0] and found[2] == found[0]


THREADS = """
import os, sys, torch
from stage04_kernels.backends.native.library import limit_threads
from stage04_kernels.backends.native.linear import NativeLinear
torch.set_num_threads(1)
linear, x = NativeLinear(torch.ones(512, 512)), torch.ones(8, 512)
torch.set_num_threads(4)
limit_threads(int(sys.argv[1]) or None)
before = len(os.listdir("/proc/self/task"))
linear(x)
print(len(os.listdir("/proc/self/task")) - before)
"""


@NATIVE
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the threads of a process are seen in /proc")
@pytest.mark.parametrize(("most", "more"), [(0, 3), (3, 2), (1, 0)])
def test_a_limit_holds_whatever_a_function_is_told(most: int, more: int) -> None:
    command = [sys.executable, "-c", THREADS, str(most)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert int(done.stdout) == more


class Clocks:
    """Wall time and processor time that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.busy = 1000.0
        monkeypatch.setattr(hook, "monotonic", lambda: self.wall)
        monkeypatch.setattr(hook, "thread_time", lambda: self.busy)

    def model(self, seconds: float, busy: float) -> Callable[[Any], Any]:
        """A model that takes so long."""

        def run(inputs: Any) -> Any:
            self.wall += seconds
            self.busy += busy
            return inputs

        return run


def test_each_step_is_measured_and_the_log_says_little(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clocks, limits = Clocks(monkeypatch), list[int | None]()
    monkeypatch.setattr(hook, "limit_threads", limits.append)
    inputs: Any = SimpleNamespace(input_ids=[0])
    each: Any = type("Config", (), {"device_config": type("Device", (), {"num_threads": 2})})
    threads = hook.AdaptiveThreadsHook(None, each)  # type: ignore[arg-type]
    monkeypatch.setattr(threads.room, "now", lambda: None)
    late, on_time = clocks.model(1 / 128, 1 / 320), clocks.model(1.0, 0.99)
    with caplog.at_level(logging.INFO):
        for step in range(1, 9):
            assert threads.forward(inputs, late) is inputs
            assert limits == [1] * (step == 8), step
        inputs.input_ids = [0] * 9
        for _ in range(4):
            threads.forward(inputs, on_time)
        assert "took 2.5 times as long as it computed, so 1 of 2 compute threads go on" in caplog.messages[-1]
        for _ in range(70):
            threads.forward(inputs, on_time)
    assert limits == [1, 2]
    assert caplog.messages[-1] == "2 of 2 compute threads again" and len(caplog.messages) == 2
    threads.shutdown()
    assert limits == [1, 2, None]


STAT = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 {} 50 10 700 20 1 2 {} 0 0
cpu1 900 0 0 0 0 0 0 0 0 0
cpu10 100 0 0 800 0 0 0 0 0 0
intr 5 5
"""


@pytest.mark.parametrize(("nice", "seconds"), [(0, 3.0), (-5, 3.0), (5, 0.5)])
def test_under_nice_only_the_kernels_time_is_its_own(
    monkeypatch: pytest.MonkeyPatch, nice: int, seconds: float
) -> None:
    """The rest stands in the column that nobody counts."""
    monkeypatch.setattr(os, "getpriority", lambda *_: nice)
    monkeypatch.setattr(room, "process_time", lambda: 3.0)
    monkeypatch.setattr(os, "times", lambda: os.times_result((2.5, 0.5, 0, 0, 0)))
    assert room.own_seconds() == seconds


def test_cores_that_others_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, now, own = tmp_path / "stat", [100.0], [10.0]
    monkeypatch.setattr(room, "monotonic", lambda: now[0])
    monkeypatch.setattr(room, "process_time", lambda: own[0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 10}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)

    def after(seconds: float, computed: float, user: int, steal: int = 0) -> float | None:
        now[0] += seconds
        own[0] += computed
        file.write_text(STAT.format(user, steal))
        return measured.now()

    assert busy_seconds(STAT.format(100, 7), {0, 10}, 100) == 2.2
    measured = room.Room(str(file))
    assert after(0.0, 0.0, 1000) is None
    assert after(0.125, 0.125, 9999) is None  # too soon to count
    assert after(0.125, 0.125, 1025) == pytest.approx(2.0)  # nobody but this process
    assert after(0.125, 0.0, 9999) == pytest.approx(2.0)  # as it was
    assert after(0.125, 0.125, 1065) == pytest.approx(0.9)
    assert after(0.25, 0.25, 1065, steal=50) == pytest.approx(1.0)
    assert after(5.0, 0.0, 1060) is None  # nobody has asked for long
    file.write_text("cpu0 1 1\n")
    now[0] += 1
    assert measured.now() is None and not measured.cores
    assert room.Room(str(tmp_path / "none")).now() is None


@NATIVE
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "async scheduling"])
def test_late_steps_are_seen_in_the_trace_and_not_in_the_tokens(
    model: Path, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = SMALL | {"num_threads": 2, "attention_backend": "native", "async_scheduling": ahead}
    with LLM(str(model), **more) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    monkeypatch.setattr(rule, "LATENESS", 0.0)
    monkeypatch.setattr(hook, "thread_time", lambda: 0.0)  # no time to compute
    with LLM(str(model), adaptive_threads=True, trace=str(tmp_path), **more) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert found == wanted
    changed = read_run(tmp_path).named("threads.changed")[0]
    assert [changed.args[name] for name in ("before", "threads", "trial", "why")] == [2, 1, True, "late"]
