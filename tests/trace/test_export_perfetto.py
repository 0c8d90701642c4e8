"""The Perfetto export: what the format asks for, checked on every recorded run and on recordings with holes."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stagetrace import Event, read_run, tell
from stagetrace.__main__ import main
from stagetrace.export.perfetto import REQUESTS_PID, PerfettoWriter

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir())


@cache
def events_of(name: str) -> list[Event]:
    return read_run(RECORDED / name).events


def export(events: list[Event]) -> list[dict[str, Any]]:
    file = io.BytesIO()
    PerfettoWriter(file).write(events)
    return json.loads(file.getvalue(), parse_float=Decimal)["traceEvents"]


def nanoseconds(record: dict[str, Any]) -> int:
    """As Perfetto reads the time: a double of microseconds, times 1,000, cut off."""
    return int(float(record["ts"]) * 1000.0)


def check_format(records: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """Slices nest on every track, and arrows bind to slices. Returns the number of slices per track."""
    names = {(r["pid"], r["tid"]) for r in records if r["ph"] == "M" and r["name"] == "thread_name"}
    processes = [r["pid"] for r in records if r["ph"] == "M" and r["name"] == "process_name"]
    assert len(processes) == len(set(processes)) and len({tid for _, tid in names}) == len(names)
    open_slices: dict[tuple[int, int], list[str]] = defaultdict(list)
    slices: Counter[tuple[int, int]] = Counter()
    arrows: dict[int, list[str]] = defaultdict(list)
    timed = [record for record in records if record["ph"] != "M"]
    for record in sorted(timed, key=nanoseconds):  # a stable sort, as Perfetto's is
        track = record["pid"], record["tid"]
        assert track in names and record["pid"] in processes
        if record["ph"] == "B":
            open_slices[track].append(record["name"])
            slices[track] += 1
        elif record["ph"] == "E":
            assert open_slices[track].pop() == record["name"], "slices overlap"
        elif record["ph"] in "sf":
            arrows[record["id"]].append(record["ph"])
            assert open_slices[track], "an arrow without a slice"
            assert record["ph"] == "s" or record["bp"] == "e"
        else:
            assert record["ph"] in "iC"
    assert not any(open_slices.values()), "a slice has no end"
    assert all(ends == ["s", "f"] for ends in arrows.values()), "an arrow has one beginning, then one end"
    return slices


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_run_has_the_right_form(name: str) -> None:
    check_format(export(events_of(name)))


@pytest.mark.parametrize("name", RUNS)
def test_the_picture_holds_what_the_recording_tells(name: str) -> None:
    events = events_of(name)
    records, story = export(events), tell(events)
    tids = {r["args"]["name"]: r["tid"] for r in records if r["ph"] == "M" and r["pid"] == REQUESTS_PID and "tid" in r}
    assert tids.keys() == story.requests.keys()
    for request_id, tid in tids.items():
        own = [r for r in records if r.get("tid") == tid]
        spans = [r for r in own if r["ph"] == "B"]
        request = story.requests[request_id]
        begins = [(r["name"], int(r["ts"] * 1000)) for r in spans[1:]]
        assert begins == [(span.kind, span.start_ns) for span in request.spans]
        ends = [int(r["ts"] * 1000) for r in own if r["ph"] == "E"][:-1]
        assert ends[:-1] == [span.end_ns for span in request.spans[:-1]]
        assert ends[-1] == request.last.get("sched.finished", request.spans[-1].end_ns)
        instants = Counter(r["name"] for r in own if r["ph"] == "i")
        assert instants == Counter(e.name for e in events if e.req == request_id)
    arrows = {end: [int(r["ts"] * 1000) for r in records if r["ph"] == end] for end in "sf"}
    sent, received = [m.sent_ns for m in story.messages], [m.received_ns for m in story.messages]
    assert sent and all(Counter(times) <= Counter(arrows[end]) for end, times in (("s", sent), ("f", received)))
    has_workers = any(name.startswith("Worker") for name in story.processes.values())  # these have arrows of their own
    assert has_workers or arrows == {"s": sent, "f": received}
    for engine, created in story.engines.items():
        own = [r for r in records if r["ph"] == "C" and r["pid"] == engine]
        steps = [step for step in story.steps if step.end_ns and step.engine == engine]
        counted = [r["args"]["used"] for r in own if r["name"] == "KV-cache blocks"]
        assert counted == [created["num_blocks"] - 1 - step.free_blocks for step in steps]
        budget = [(int(r["ts"] * 1000), r["args"]["used"]) for r in own if r["name"] == "token budget"]
        assert budget == [(step.start_ns, step.total_tokens) for step in steps]


def test_a_lost_end_of_a_span_does_not_prolong_the_span_around_it() -> None:
    events = events_of("one_request")
    lost = next(e for e in events if e.name == "model.forward" and e.ph == "E")
    steps = [e.ts for e in events if e.name == "engine.step" and e.ph == "E"]
    records = export([e for e in events if e is not lost])
    check_format(records)
    assert [int(r["ts"] * 1000) for r in records if r["name"] == "engine.step" and r["ph"] == "E"] == steps


@given(st.sampled_from(["preemption", "mixed", "engine_death", "client_abort"]), st.data())
def test_recordings_with_holes_have_the_right_form(name: str, data: st.DataObject) -> None:
    """A crash cuts the end off, filters leave events out."""
    events = events_of(name)
    start = data.draw(st.integers(0, len(events) - 1))
    window = events[start : start + data.draw(st.integers(1, 150))]
    missing = data.draw(st.sets(st.sampled_from(sorted({e.name for e in window}))))
    holes = data.draw(st.sets(st.integers(0, len(window) - 1), max_size=20))
    check_format(export([e for i, e in enumerate(window) if e.name not in missing and i not in holes]))


@given(st.lists(st.integers(-20, 30), min_size=200, max_size=200), st.integers(10**6, 10**17))
def test_times_that_crowd_together_do_not_overlap(gaps: list[int], boot: int) -> None:
    """Nanoseconds apart, none at all, or backwards (a cause with a later time than its effect), after any time since boot."""
    now, crowded = boot, []
    for event, gap in zip(events_of("one_request"), gaps):
        now += gap
        crowded.append(Event(**{key: getattr(event, key) for key in Event.__struct_fields__} | {"ts": now}))
    records = export(crowded)
    open_slices: dict[int, list[str]] = defaultdict(list)
    for record in sorted((r for r in records if r["ph"] in "BE"), key=nanoseconds):
        if record["ph"] == "B":
            open_slices[record["tid"]].append(record["name"])
        else:
            assert open_slices[record["tid"]].pop() == record["name"]


def test_messages_that_follow_each_other_closely_begin_at_their_times() -> None:
    sent = next(e for e in events_of("one_request") if e.name == "zmq.request_sent")
    fields = {key: getattr(sent, key) for key in Event.__struct_fields__}
    sends = [Event(**fields | {"seq": sent.seq + i, "ts": sent.ts + 7 * i}) for i in range(3)]
    begins = [int(r["ts"] * 1000) for r in export(sends) if r["ph"] == "B" and r["name"] == "ADD"]
    assert begins == [e.ts for e in sends]


def test_the_command_writes_the_file_or_says_in_a_line_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, run = tmp_path / "one.json", str(RECORDED / "one_request")
    for _ in range(2):  # replacing needs no flag
        assert main(["export", run, "--perfetto", str(target)]) == 0
    written = json.loads(target.read_text())
    assert written["displayTimeUnit"] == "ns" and len(written["otherData"]) == 2
    target.unlink()
    several = {"--perfetto": target, "--html": tmp_path / "one.html", "--csv": tmp_path / "t", "--otlp": tmp_path / "o"}
    assert main(["export", run, *(str(word) for pair in several.items() for word in pair)]) == 0
    assert all(path.exists() for path in several.values()) and "<html" in several["--html"].read_text()
    for wrong in ([], ["--perfetto", str(tmp_path / "no" / "x.json")], ["--perfetto", str(tmp_path)]):
        capsys.readouterr()
        assert main(["export", run, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
