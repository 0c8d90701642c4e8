"""`diff`: two recordings of the same run are the same, whatever is random in them; any other difference is found where it begins."""

from __future__ import annotations

import copy
import json
import random
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from toy_engine import STEM, ToyEngine, random_life, record

from stagetrace.__main__ import main
from stagetrace.check.difference import Fact, StepFacts, compare

RECORDED = sorted(path for path in (Path(__file__).parents[2] / "trace" / "recorded").iterdir() if path.is_dir())
Line = dict[str, Any]


def life(**settings_of_engine: Any) -> Callable[[], None]:
    def live() -> None:
        engine = ToyEngine(4, num_blocks=26, num_drafts=2, max_num_batched_tokens=40, **settings_of_engine)
        for i in range(8):
            engine.add(f"cmpl-r{i}-{random.getrandbits(32):08x}-0", [*STEM[:7], i], max_tokens=20, ignore_eos=True)
            engine.step()
        engine.run()

    return live


def lines_of(directory: Path) -> tuple[Path, list[Line]]:
    (path,) = directory.glob("*.jsonl")
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def write(directory: Path, lines: list[Line]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "EngineCore_DP0-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@given(st.integers(0, 10**6))
def test_the_same_life_twice_is_the_same(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        a, b = (
            record(Path(folder, name), lambda: random_life(ToyEngine(seed, num_drafts=2, swap_blocks=4), 8))
            for name in "ab"
        )
        result = compare(a, b)
        assert result.same and not result.settings and result.num_steps[0] == result.num_steps[1] > 0


def test_times_pids_and_random_ids_are_ignored(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a", life()), record(tmp_path / "b", life())
    assert {line.get("req") for line in lines_of(a)[1]} & {line.get("req") for line in lines_of(b)[1]} == {None}
    assert compare(a, b).same


@pytest.mark.parametrize("place", ["{0}", ["{0}", "{1}"], {"7": ["{1}", "{0}"]}, {"{0}": 1}], ids=str)
def test_ids_are_ignored_wherever_an_event_has_them(place: Any, tmp_path: Path) -> None:
    """Also in arguments of features that did not exist when this was written."""
    sides = []
    for name in "ab":
        path, lines = lines_of(record(tmp_path / name, life()))
        ids = [line["req"] for line in lines if line["name"] == "sched.queued"]
        said = json.loads(json.dumps(place).replace("{0}", ids[0]).replace("{1}", ids[1]))
        last = next(line for line in reversed(lines) if line["name"] == "sched.scheduled")
        last["args"]["of_a_feature"] = said
        write(path.parent, lines)
        sides.append(path.parent)
    assert compare(*sides).same


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: path.name)
def test_a_recording_is_like_itself_and_unlike_the_others(folder: Path) -> None:
    assert compare(folder, folder).same
    place = RECORDED.index(folder)
    others = [*RECORDED[place + 1 :], *RECORDED[:place]]
    assert all(not compare(folder, other).same for other in others[:5])


@given(st.data())
def test_one_changed_event_is_found_in_its_step_and_request(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, lines = lines_of(record(Path(folder, "run"), life()))
        changed = copy.deepcopy(lines)
        place = data.draw(st.sampled_from([i for i, line in enumerate(lines) if line["name"] == "sched.scheduled"]))
        step, request_id = changed[place]["step"], changed[place]["req"]
        changed[place]["args"]["num_tokens"] += 1
        write(Path(folder, "a"), lines)
        write(Path(folder, "b"), changed)
        result = compare(Path(folder, "a"), Path(folder, "b"))
        (lane,), ((name, of_request),) = result.steps.values(), result.requests.items()
        assert isinstance(lane.a, StepFacts) and lane.a.step == step == lane.place + 1
        assert name.replace("*", request_id.split("-")[2]) == request_id
        assert isinstance(of_request.a, Fact) and of_request.a.name == "sched.scheduled"
        assert of_request.place == sum(
            line.get("req") == request_id and not line["name"].startswith("kv.") for line in lines[:place]
        )


def test_a_policy_shows_in_the_settings_and_in_the_first_step_that_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = record(tmp_path / "a", life()), record(tmp_path / "b", life(max_num_seqs=3))
    assert main(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "settings differ: max_num_seqs: A 8, B 3" in out
    assert "step 4 is the first that differs (3 steps before it are the same)" in out
    assert "A before: running: cmpl-r0-*-0" in out and "B does:   sched.held_back rule=max_num_seqs" in out
    assert "cmpl-r3-*-0, its event" in out and "Traceback" not in out
    assert main(["diff", str(a), str(a)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["diff", str(a), str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_recording_that_ends_earlier_differs_where_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, lines = lines_of(record(tmp_path / "a", life()))
    end = next(i for i, line in enumerate(lines) if line["name"] == "engine.step" and line["step"] == 9)
    write(tmp_path / "b", lines[:end])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "B before: the recording ends before this step" in capsys.readouterr().out


def test_only_the_engine_is_compared_when_only_it_is_asked_for(tmp_path: Path) -> None:
    (a,) = [folder for folder in RECORDED if folder.name == "one_request"]
    for path in a.glob("*.jsonl"):
        text = path.read_text()
        if path.name.startswith("APIServer"):
            assert '"name":"request.finished"' in text
            text = text.replace('"reason":"length"', '"reason":"stop"')
        (tmp_path / path.name).write_text(text)
    assert not compare(a, tmp_path).same and compare(a, tmp_path, only_core=True).same


@pytest.mark.slow
def test_memory_does_not_grow_with_the_recordings(tmp_path: Path) -> None:
    def many(count: int) -> Path:
        def live() -> None:
            engine = ToyEngine(1)
            for i in range(count):
                engine.add(f"r{i}", [1, 2, i % 50], max_tokens=20, ignore_eos=True)
                engine.run()

        return record(tmp_path / str(count), live)

    peaks = []
    for count in (20, 120):
        run = many(count)
        tracemalloc.start()
        assert compare(run, run).same
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0], peaks
