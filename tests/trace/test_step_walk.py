"""`step`: a walk forward and back through a recording, driven as a script drives it."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stagetrace import Recording, read_run, tell
from stagetrace.__main__ import main
from stagetrace.read.walk import Walk

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())


@pytest.fixture
def walk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run `step` on a recorded run with these commands; returns what each printed."""

    def run(name: str, *commands: str) -> list[str]:
        outputs = []

        class Script(io.StringIO):
            def readline(self, *args: int) -> str:
                outputs.append(capsys.readouterr().out)
                return super().readline(*args)

        monkeypatch.setattr("sys.stdin", Script("".join(f"{command}\n" for command in commands)))
        assert main(["step", str(RECORDED / name)]) == 0
        return outputs

    return run


def number(output: str) -> int:
    return int(re.findall(r"^#(\d+) ", output, re.M)[-1])


def test_forward_and_back_by_events(walk) -> None:
    events = read_run(RECORDED / "mixed").events
    shown = walk("mixed", "", "n", "n 5", "b", "b 3", "b 100", "n 100000", "")
    assert [number(output) for output in shown] == [1, 2, 3, 8, 7, 4, 1, len(events), len(events)]
    assert "the recording begins here" in shown[6] and "the recording ends here" in shown[7]
    for output in shown:
        assert events[number(output) - 1].name in output


def test_to_steps_tokens_events_and_requests(walk) -> None:
    shown = walk(
        "mixed",
        "s 5",
        "/sched.adm",
        "/",
        "r r1",
        "t 3",
        "/sse*",
        "r",
        "t 20",
        "s 3",
        "s 999",
        "/nothing",
        "?",
        "hello",
        "n x",
        "r zz",
        "q",
        "n",
    )
    assert len(shown) == 16  # nothing is read after q
    start, s5, admit, again, r1, t3, chunk, _, t20, s3, none, nothing, help_text, unknown, wrong, nobody = shown
    assert number(start) == 1 and "engine.step begin" in s5 and "step 5" in s5
    assert "sched.admit" in admit and "sched.admit" in again and number(again) > number(admit) > number(s5)
    assert "  r1\n" in r1 and "sched.token num_tokens=1 sampled=1 num_output_tokens=3" in t3 and "  r1\n" in t3
    assert "sse.chunk" in chunk and "  r1\n" in chunk
    assert "sched.token" in t20 and "tokens so far 20" in t20
    assert "engine.step begin" in s3 and "step 3" in s3 and number(s3) < number(s5)
    assert "no step 999" in none and "no nothing after" in nothing and "no request zz" in nobody
    assert "Enter" in help_text and "no command 'hello'" in unknown and "expected a number, not 'x'" in wrong


def test_an_event_comes_with_its_meaning_and_its_counterpart(walk) -> None:
    output = walk("preemption", "/sched.preempt", "q")[1]
    assert "Too few blocks were free" in output and "v1/core/sched/scheduler.py _preempt_request" in output
    assert "here: stage03_engine, scheduler" in output


@pytest.mark.parametrize("run", RUNS)
def test_the_state_agrees_with_what_the_engine_said(run: str) -> None:
    """At every step's begin the engine itself counts its queues; at every decision, blocks and budget."""
    walk = Walk(Recording(RECORDED / run))
    steps = {(step.engine, step.step): step for step in tell(Recording(RECORDED / run)).steps}
    seen = 0
    while walk.forward(lambda place: place.event.step is not None):
        assert walk.place is not None
        event, state = walk.place.event, walk.place.state
        if event.name == "engine.step" and event.ph == "B":
            assert (len(state.running), len(state.waiting)) == (event.args["running"], event.args["waiting"])
            seen += 1
        elif event.name == "sched.output":
            step = steps[event.pid, event.step or 0]
            assert (state.free_blocks, state.budget) == (step.free_blocks, step.budget)
            assert state.budget_left == step.budget - step.total_tokens
    assert seen == len(steps)


@given(st.integers(0, 2**32))
def test_a_short_memory_shows_in_nothing(seed: int) -> None:
    """Random walks with a history of a few events end where a list of all events says."""
    rng = random.Random(seed)
    events = read_run(RECORDED / "client_abort").events
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stagetrace.read.walk.HISTORY", rng.choice([1, 2, 7, 50]))
        walk = Walk(Recording(RECORDED / "client_abort"))
        at = 0
        for _ in range(25):
            name = rng.choice([None, None, "engine.step", "sse.chunk", "run.start", "request.aborted"])
            way = rng.choice(["forward", "back", "from_start"])
            places = {
                "forward": range(at + 1, len(events)),
                "back": range(at - 1, -1, -1),
                "from_start": range(len(events)),
            }[way]
            expected = next((i for i in places if name in (None, events[i].name)), None)
            assert getattr(walk, way)(lambda place, name=name: name in (None, place.event.name)) == (
                expected is not None
            )
            at = at if expected is None else expected
            assert walk.place is not None and walk.place.number == at + 1 and walk.place.event == events[at]
