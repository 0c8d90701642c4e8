"""Fewer compute threads while other programs need the cores, and more again: the rule, the measuring, and that no number changes."""

from __future__ import annotations

import itertools
import logging
import os
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
from stage03_engine.core.features.adaptive_threads import hook
from stage03_engine.core.features.adaptive_threads.policy import (
    LONGEST_WAIT,
    MOST_LATE_WINDOWS,
    SHORTEST_WAIT,
    ThreadPolicy,
    Window,
)
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
ON_TIME, LATE = 1.0, 2.1


def decisions(policy: ThreadPolicy, *lateness: float) -> list[int]:
    return [policy.decide(Window(each, 1.0)) for each in lateness]


def test_threads_that_are_on_time_stay() -> None:
    assert set(decisions(ThreadPolicy(4), *[ON_TIME, 1.4] * 200)) == {4}


def test_two_late_windows_in_a_row_halve_them() -> None:
    assert decisions(ThreadPolicy(8), LATE, ON_TIME, LATE, ON_TIME) == [8] * 4
    assert decisions(ThreadPolicy(8), *[LATE] * 7) == [8, 4, 4, 2, 2, 1, 1]
    assert decisions(ThreadPolicy(3), LATE, LATE) == [3, 1]
    assert Window(1.0, 0.0).late  # no processor time at all is late


def test_a_trial_that_is_late_makes_the_next_one_wait_twice_as_long() -> None:
    policy = ThreadPolicy(2)
    decisions(policy, LATE, LATE)
    waits = []
    for _ in range(7):
        waits.append(0)
        while policy.decide(Window(ON_TIME, 1.0)) == 1:
            waits[-1] += 1
        assert policy.trying
        assert policy.decide(Window(LATE, 1.0)) == 1 and not policy.trying
    assert [wait + 1 for wait in waits] == [SHORTEST_WAIT << n for n in range(5)] + [LONGEST_WAIT] * 2


def test_a_trial_that_is_on_time_stays_and_the_next_core_is_tried_soon() -> None:
    policy = ThreadPolicy(4)
    decisions(policy, *[LATE] * 4)
    assert decisions(policy, *[ON_TIME] * 4 * LONGEST_WAIT)[-1] == 4
    assert policy._wait == SHORTEST_WAIT  # forgiven


def test_fewer_threads_that_are_slower_go_back_and_are_tried_ever_more_rarely() -> None:
    """Late, and the best there is: the server's other processes have the cores for a moment, again and again."""
    policy, tries = ThreadPolicy(2), list[int]()
    for window in range(1000):
        two = policy.threads == 2
        if policy.decide(Window(1.6 if two else 2.2, 1.0 if two else 2.1)) == 1:
            tries.append(window)
    assert [later - before for before, later in itertools.pairwise(tries)][:5] == [5, 9, 17, 33, 65]
    assert len(tries) < 7 + 1000 // MOST_LATE_WINDOWS
    decisions(policy, *[ON_TIME] * MOST_LATE_WINDOWS)
    assert decisions(policy, LATE, LATE) == [2, 1]  # forgiven


def test_a_trial_that_is_late_and_faster_stays() -> None:
    policy = ThreadPolicy(2)
    decisions(policy, LATE, LATE, *[ON_TIME] * SHORTEST_WAIT)
    assert policy.threads == 2 and policy.trying
    assert policy.decide(Window(0.8, 0.4)) == 2 and not policy.trying


def test_steps_of_another_size_say_nothing() -> None:
    one = Window(1.0, 1.0, steps=4, tokens=4)
    assert [Window(each, 1.0, 4, 4).compared(one) for each in (0.9, 0.97, 1.03, 1.2)] == [1, 0, 0, -1]
    assert [Window(9.0, 1.0, steps, tokens).compared(one) for steps, tokens in ((4, 128), (8, 8), (1, 2))] == [0, -1, 0]


def test_nothing_is_tried_while_even_one_thread_is_late() -> None:
    policy = ThreadPolicy(2)
    assert decisions(policy, *[LATE] * 500)[1:] == [1] * 499
    assert not policy.trying


@given(st.integers(1, 16), st.lists(st.floats(0.9, 9.0), max_size=300))
def test_there_is_always_a_thread_and_never_one_too_many(most: int, lateness: list[float]) -> None:
    policy, before = ThreadPolicy(most), most
    for threads in decisions(policy, *lateness):
        assert 1 <= threads <= most
        assert threads <= before + 1
        before = threads


@settings(max_examples=20)
@given(st.integers(2, 16), st.data())
def test_it_finds_the_cores_that_are_left(most: int, data: st.DataObject) -> None:
    """Other work takes some cores for good: threads that find none are late. Soon there are as many as there are cores left, and one more is rare."""
    left = data.draw(st.integers(1, most - 1))
    policy, counts = ThreadPolicy(most), []
    for _ in range(1500):
        counts.append(policy.decide(Window(LATE if policy.threads > left else ON_TIME, 1.0)))
    settled = counts[500:]
    assert set(settled) <= {left, left + 1}
    assert settled.count(left + 1) <= len(settled) // LONGEST_WAIT + 1
    for _ in range(most * SHORTEST_WAIT + LONGEST_WAIT):  # the other work ends
        policy.decide(Window(ON_TIME, 1.0))
    assert policy.threads == most


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


def test_a_window_has_enough_steps_and_enough_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clocks, limits = Clocks(monkeypatch), list[int | None]()
    monkeypatch.setattr(hook, "limit_threads", limits.append)
    inputs: Any = SimpleNamespace(input_ids=[0])
    each: Any = type("Config", (), {"device_config": type("Device", (), {"num_threads": 2})})
    threads = hook.AdaptiveThreadsHook(None, each)  # type: ignore[arg-type]
    late, on_time = clocks.model(1 / 128, 1 / 320), clocks.model(1.0, 0.99)
    with caplog.at_level(logging.INFO):
        for step in range(1, 15):  # seven steps of 8 ms are a window
            assert threads.forward(inputs, late) is inputs
            assert limits == [1] * (step == 14), step
        inputs.input_ids = [0] * 9
        for _ in range(4):  # four steps of a second are one
            threads.forward(inputs, on_time)
        assert "took 2.5 times as long as it computed, so 1 of 2 compute threads go on" in caplog.messages[-1]
        for _ in range(16 * SHORTEST_WAIT):
            threads.forward(inputs, on_time)
    assert limits == [1, 2]
    assert caplog.messages[-1] == "2 of 2 compute threads again" and len(caplog.messages) == 2
    threads.shutdown()
    assert limits == [1, 2, None]


@NATIVE
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "async scheduling"])
def test_late_steps_are_seen_in_the_trace_and_not_in_the_tokens(
    model: Path, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = SMALL | {"num_threads": 2, "attention_backend": "native", "async_scheduling": ahead}
    with LLM(str(model), **more) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    monkeypatch.setattr(hook, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(hook, "thread_time", lambda: 0.0)  # no time to compute
    with LLM(str(model), adaptive_threads=True, trace=str(tmp_path), **more) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert found == wanted
    changed = read_run(tmp_path).named("threads.changed")[0]
    assert (changed.args["before"], changed.args["threads"], changed.args["trial"]) == (2, 1, True)
