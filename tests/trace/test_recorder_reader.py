"""stagetrace on its own: what is recorded comes back, in causal order, also after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date, datetime, time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from stagetrace import VOCABULARY, Event, Recorder, read_run
from stagetrace.event import decode_line, encode_line
from stagetrace.read.reader import causal_order


def test_what_is_recorded_comes_back(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.hold("APIServer")
    first = recorder.emit("cli.main", argv=["serve"])
    recorder.open(str(tmp_path), seed=7, config_hash="abc")
    recorder.emit("sched.admit", req="r0", step=3, cause=first, new_blocks=[4, 5], num_prompt_tokens=9)
    recorder.close()
    recorder.close()
    run = read_run(tmp_path)
    start, main, admit = run.events
    assert [e.name for e in run.events] == ["run.start", "cli.main", "sched.admit"]
    assert start.args["seed"] == 7 and start.args["config_hash"] == "abc" and run.run_ids == {start.args["run_id"]}
    assert {"monotonic_ns", "wall_clock_ns", "python", "argv"} <= start.args.keys()
    assert (admit.req, admit.step, admit.cause, admit.phase, admit.proc) == ("r0", 3, main.ref, 8, "APIServer")
    assert admit.src.startswith("test_recorder_reader.py:") and run.of_request("r0") == [admit]
    assert (tmp_path / f"APIServer-{os.getpid()}.jsonl").exists()


def test_the_console_line_is_the_same_event(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    recorder.hold("EngineCore_DP0")
    recorder.open(str(tmp_path), console=True)
    recorder.emit("sched.admit", req="r0", step=3, new_blocks=[4, 5], num_prompt_tokens=9)
    recorder.emit("engine.step", ph="B", step=3, running=1, waiting=0)
    recorder.close()
    _, *lines = capfd.readouterr().err.splitlines()
    header, *events = read_run(tmp_path).events
    what = "[TRACE] (test_recorder_reader.py)"
    assert lines[0].endswith(f" phase 8 {what} sched.admit req=r0 step=3 new_blocks=[4, 5] num_prompt_tokens=9")
    assert lines[1].endswith(f" phase 8 {what} engine.step begin step=3 running=1 waiting=0")
    wall = header.args["wall_clock_ns"] - header.args["monotonic_ns"]
    for line, event in zip(lines, events, strict=True):
        who, clock, rest = line.split(" ", 2)
        assert (who, rest) == ("EngineCore_DP0", f"phase {event.phase} {event.console_line()}")
        said = datetime.combine(date.today(), time.fromisoformat(clock)).timestamp()
        assert abs((event.ts + wall) / 1e9 - said) % 86400 < 1, "the local time of the event, as in the log"


def test_off_means_off_and_dropped_events_are_gone(tmp_path: Path) -> None:
    recorder = Recorder()
    assert not recorder.on
    recorder.hold("CLI")
    recorder.emit("cli.main", argv=[])
    recorder.drop()
    assert not recorder.on
    recorder.open(str(tmp_path))
    recorder.close()
    assert [e.name for e in read_run(tmp_path).events] == ["run.start"]


def test_a_name_outside_the_vocabulary_is_an_error() -> None:
    recorder = Recorder()
    recorder.hold("CLI")
    with pytest.raises(KeyError):
        recorder.emit("sched.invented")


def test_a_crash_loses_the_last_buffer_and_a_torn_line_at_most(tmp_path: Path) -> None:
    script = """if True:
        import os, sys
        from stagetrace import trace
        trace.open(sys.argv[1])
        for i in range(50):
            trace.emit("sched.queued", req=f"r{i}", waiting=i)
        trace.flush()
        trace.emit("sched.queued", req="lost", waiting=0)
        os._exit(9)
    """
    subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    file = next(tmp_path.glob("*.jsonl"))
    assert len(read_run(tmp_path).named("sched.queued")) == 50
    file.write_bytes(file.read_bytes()[:-7])
    run = read_run(tmp_path)
    assert (len(run.named("sched.queued")), run.torn) == (49, 1)


def test_a_foreign_line_is_reported_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"hello": 1}\n{"hello": 2}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:1"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no trace in"):
        read_run(tmp_path / "nowhere")


events = st.builds(
    Event, v=st.just(1), seq=st.integers(0, 10**6), ts=st.integers(0, 2**62), pid=st.integers(1, 10**6), proc=st.text(max_size=5),
    ph=st.sampled_from("iBE"), name=st.sampled_from(sorted(VOCABULARY)), phase=st.integers(0, 9), src=st.text(max_size=5),
    req=st.none() | st.text(max_size=5), step=st.none() | st.integers(0, 99), cause=st.none() | st.text(max_size=5),
    args=st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3), max_size=3),
)  # fmt: skip


@given(events)
def test_every_event_survives_its_line(event: Event) -> None:
    try:
        line = encode_line(event)
    except (UnicodeEncodeError, msgspec.MsgspecError, OverflowError):
        return
    assert line.count(b"\n") == 1 and decode_line(line) == event


@given(st.data())
def test_no_event_stands_before_its_cause_even_when_clocks_disagree(data: st.DataObject) -> None:
    """Messages between processes whose clocks are off by up to their whole run."""
    offsets = data.draw(st.lists(st.integers(-1000, 1000), min_size=2, max_size=4))
    lanes: list[list[Event]] = [[] for _ in offsets]
    sent: list[str] = []
    for now in range(data.draw(st.integers(1, 40))):
        lane = data.draw(st.integers(0, len(offsets) - 1))
        cause = data.draw(st.sampled_from([None, *sent]))
        event = Event(1, len(lanes[lane]), now + offsets[lane], lane, "p", "i", "cli.main", 1, "x:1", cause=cause)
        lanes[lane].append(event)
        sent.append(event.ref)
    ordered = list(causal_order(lanes))
    place = {event.ref: i for i, event in enumerate(ordered)}
    assert len(ordered) == sum(map(len, lanes)) == len(place)
    for event in ordered:
        assert event.cause is None or place[event.cause] < place[event.ref]
        assert event.seq == 0 or place[f"{event.pid}:{event.seq - 1}"] < place[event.ref]


def test_the_vocabulary_is_well_formed() -> None:
    for name, row in VOCABULARY.items():
        assert name == row.name and 0 <= row.phase <= 9 and row.meaning.endswith(".") and row.vllm
    assert {row.phase for row in VOCABULARY.values() if row.main_path} == set(range(10))


def test_closing_forgets_what_was_only_held(tmp_path: Path) -> None:
    """A command line that is refused before it says where to record must leave nothing for the next one."""
    recorder = Recorder()
    recorder.hold("CLI")
    recorder.emit("cli.main", argv=[])
    recorder.close()
    assert not recorder.on
    recorder.open(str(tmp_path))
    recorder.close()
    assert [event.name for event in read_run(tmp_path).events] == ["run.start"]


@pytest.mark.parametrize("apart, shift", [(0, 0), (400_000_000, 0), (90_000_000_000_000, 90_000_000_000_000)])
def test_recordings_of_two_machines_have_one_time(tmp_path: Path, apart: int, shift: int) -> None:
    """Each machine's monotonic clock has a zero of its own. A wall clock that was set meanwhile is no other machine."""
    for proc, zero in (("APIServer", 0), ("Node_1", apart)):
        started = Event(1, 0, 1_000, 1 + bool(zero), proc, "i", "run.start", 0, "x.py:1")
        started.args = {"run_id": "r", "monotonic_ns": 1_000, "wall_clock_ns": 5_000_000_000 + zero + 1_000}
        later = Event(1, 1, 2_000, 1 + bool(zero), proc, "i", "engine.stopped", 5, "x.py:2")
        (tmp_path / f"{proc}-1.jsonl").write_bytes(encode_line(started) + encode_line(later))
    times = {(event.proc, event.name): event.ts for event in read_run(tmp_path).events}
    assert times["APIServer", "engine.stopped"] == 2_000
    assert times["Node_1", "run.start"] == 1_000 + shift and times["Node_1", "engine.stopped"] == 2_000 + shift
