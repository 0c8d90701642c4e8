"""`check`: a whole recording is consistent, every change to it is noticed, and what a killed process leaves is explained."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from toy_engine import STEM, ToyEngine, random_life, record

from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset
from stagetrace import read_run
from stagetrace.__main__ import main
from stagetrace.check.invariants import Report, check

Line = dict[str, Any]
RECORDED = sorted(path for path in (Path(__file__).parents[2] / "trace" / "recorded").iterdir() if path.is_dir())


def life() -> None:
    """Preemption with swapping, prefix hits, drafts, an abort: every kind of event."""
    engine = ToyEngine(5, num_blocks=26, swap_blocks=12, num_drafts=3, max_num_seqs=5, max_num_batched_tokens=40)
    for i in range(9):
        engine.add(f"r{i}", [*STEM[:9], i], max_tokens=30, ignore_eos=True)
    for _ in range(12):
        engine.step()
    engine.scheduler.finish_requests(["r1"])
    engine.run()
    reset(engine.scheduler)


def changed(directory: Path, change: Callable[[list[Line]], None]) -> Report:
    """What `check` says of the recording of `life` after a change to its lines."""
    (path,) = record(directory, life).glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check(directory)


def _number(lines: list[Line]) -> None:
    """From 1 on, as a process of its own does; this one has recorded before. After a change: as if the recorder had never been
    told of what is missing."""
    for number, line in enumerate(lines):
        line["seq"] = number


@given(st.integers(0, 10**6), st.sampled_from([0, 4]), st.sampled_from([0, 3]), st.booleans())
def test_whatever_an_engine_does_its_recording_is_consistent(seed: int, swap: int, drafts: int, caching: bool) -> None:
    def some_life() -> None:
        random_life(ToyEngine(seed, num_blocks=26, swap_blocks=swap, num_drafts=drafts, caching=caching), 12)

    with tempfile.TemporaryDirectory() as folder:
        _from_one(record(Path(folder), some_life))
        report = check(folder)
        assert report.consistent, [str(finding) for finding in report.findings]


def _from_one(directory: Path) -> None:
    (path,) = directory.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    _number(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: path.name)
def test_the_recorded_runs_are_consistent_but_for_the_killed_and_the_leaking_engine(folder: Path) -> None:
    report = check(folder)
    texts = [str(finding) for finding in report.findings]
    if folder.name == "bug_leak":
        assert len(texts) == 1 and re.search(r"sched.finished .*: blocks .* were not given back", texts[0]), texts
    elif folder.name in ("engine_death", "dp2_death"):
        assert report.deaths and texts and all(finding.explained for finding in report.findings)
    else:
        assert report.consistent, texts


def test_the_life_below_has_every_kind_of_event(tmp_path: Path) -> None:
    report = changed(tmp_path, _number)
    assert report.consistent and report.events == len(read_run(tmp_path).events)
    seen = {e.name for e in read_run(tmp_path).events}
    assert {"sched.preempt", "sched.resume", "kv.swapped", "spec.verified", "sched.prefix_hit", "kv.reset"} <= seen


def last(lines: list[Line], name: str, ph: str = "i") -> Line:
    return [line for line in lines if line["name"] == name and line["ph"] == ph][-1]


def drop(name: str, ph: str = "i") -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        lines.remove(last(lines, name, ph))

    return change


def alter(name: str, how: Callable[[Line], Any]) -> Callable[[list[Line]], None]:
    return lambda lines: how(last(lines, name))


CHANGES: dict[str, tuple[Callable[[list[Line]], None], str]] = {
    "an end is not reported": (drop("sched.finished"), "never ended there"),
    "an arrival is not reported": (drop("sched.queued"), "which is not queued"),
    "a block is taken in silence": (drop("kv.allocated"), "are not the request's|blocks are said to be free"),
    "a block is given back in silence": (drop("kv.freed"), "were not given back"),
    "a scheduled request is not reported": (drop("sched.scheduled"), "its requests get"),
    "a step does not end": (drop("engine.step", "E"), "never ended"),
    "a step does not begin": (drop("engine.step", "B"), "and none is open"),
    "a block of somebody else": (alter("kv.allocated", lambda e: e["args"]["blocks"].append(99)), "are not free"),
    "a foreign block is freed": (alter("kv.freed", lambda e: e["args"].update(blocks=[25, 24, 23, 1])), "are not the request's|not given"),
    "a hit on what is not cached": (alter("sched.prefix_hit", lambda e: e["args"].update(blocks=[99])), "are not cached"),
    "another number of free blocks": (alter("sched.output", lambda e: e["args"].update(free_blocks=3)), "3 blocks are said to be free"),
    "more tokens than the budget": (alter("sched.output", lambda e: e["args"].update(budget=0)), "more than the budget of 0"),
    "another total": (alter("sched.output", lambda e: e["args"].update(total_tokens=999)), "and it says 999"),
    "an event twice": (lambda lines: lines.append(dict(lines[-3])), "comes twice"),
    "an unknown event": (alter("sched.output", lambda e: e.update(name="sched.invented")), "no event sched.invented"),
    "a wrong type": (alter("sched.output", lambda e: e["args"].update(budget="40")), "budget='40', which is no int"),
    "a missing argument": (alter("sched.output", lambda e: e["args"].pop("budget")), "sched.output lacks budget"),
    "an argument too many": (alter("kv.cached", lambda e: e["args"].update(colour=1)), "kv.cached has colour"),
    "a wrong phase": (alter("kv.cached", lambda e: e.update(phase=3)), "is of phase 8, not 3"),
    "a cause that nobody recorded": (alter("kv.cached", lambda e: e.update(cause="1:1")), "was caused by 1:1, which"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_contradicts_itself_is_found(what: str, tmp_path: Path) -> None:
    change, words = CHANGES[what]

    def both(lines: list[Line]) -> None:
        _number(lines)
        change(lines)
        if "twice" not in what:
            _number(lines)

    report = changed(tmp_path, both)
    assert any(re.search(words, str(finding)) for finding in report.findings), [str(f) for f in report.findings]


@given(st.data())
def test_a_lost_line_is_missed_by_its_number(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = 0

        def lose(lines: list[Line]) -> None:
            nonlocal place
            _number(lines)
            place = data.draw(st.integers(1, len(lines) - 2))
            del lines[place]

        report = changed(Path(folder), lose)
        assert any(f"event {place} missing" in finding.text and not finding.explained for finding in report.findings)


def test_damage_of_an_argument_never_ends_in_a_traceback(tmp_path: Path) -> None:
    """Whatever is taken away from an event: the answer is a finding."""
    (path,) = record(tmp_path, life).glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for name in sorted({line["name"] for line in lines if line["args"]} - {"run.start"}):
        broken = [dict(line, args=dict(line["args"])) for line in lines]
        last(broken, name, "B" if name == "engine.step" else "i")["args"] = {}
        path.write_text("".join(json.dumps(line) + "\n" for line in broken))
        assert any(f"{name} lacks" in finding.text for finding in check(tmp_path).findings)


def test_what_was_rotated_away_or_filtered_out_is_no_contradiction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = record(tmp_path, life).glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    header, rest = lines[0], lines[len(lines) // 2 :]
    header["args"]["part"] = 3
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *rest]))
    assert main(["check", str(tmp_path)]) == 0
    assert "the first files of EngineCore_DP0-" in capsys.readouterr().out
    header["args"].update(part=0, filter={"names": "sched.*"})
    some = [line for line in lines[1:] if line["name"].startswith("sched.")]
    _number([header, *some])
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *some]))
    assert main(["check", str(tmp_path)]) == 0
    assert "a filter left some out" in capsys.readouterr().out
    del some[5]
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *some]))
    assert main(["check", str(tmp_path)]) == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, life)
    _from_one(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(": consistent\n")
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "its last line is torn; its last recorded event is" in out and "0 findings" in out
    assert main(["check", "nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
