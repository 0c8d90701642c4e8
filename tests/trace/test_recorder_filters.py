"""Filters and sampling: what a recording keeps, and that it keeps a request whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from server_under_test import all_prefixes

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError
from stagetrace import EventFilter, Recorder, read_run, root_of
from stagetrace.read.terminal import short_id

PREFIXES = all_prefixes()
SMALL = {"model": "gpt2-tiny", "device": "cpu"}


def served(recorder: Recorder, steps: list[list[str]]) -> None:
    """A run in the shape of the engine's: start-up, then steps with these requests, then the end."""
    recorder.emit("engine.busy_loop")
    for request_id in dict.fromkeys(i for step in steps for i in step):
        recorder.emit("http.request", req=request_id)
        recorder.emit("sched.queued", req=request_id)
    for number, request_ids in enumerate(steps, start=1):
        recorder.emit("engine.step", ph="B", step=number)
        recorder.emit("kv.evicted", block=1)
        for request_id in request_ids:
            recorder.emit("kv.allocated", req=request_id)
            recorder.emit("sched.scheduled", req=request_id, step=number)
        for name in ("sched.output", "model.forward"):
            recorder.emit(name, step=number)
        for request_id in request_ids:
            recorder.emit("sched.token", req=request_id, step=number)
        recorder.emit("engine.step", ph="E", step=number)
        recorder.emit("zmq.outputs_sent", step=number)
    recorder.emit("http.request", path="/health")
    recorder.emit("engine.failed")


def recorded(folder: Path, steps: list[list[str]], **flags: Any) -> list[Any]:
    recorder = Recorder()
    recorder.open(str(folder), events=EventFilter(**flags))
    served(recorder, steps)
    recorder.close()
    return [e for e in read_run(folder).events if e.name != "run.start"]


def test_phases_names_and_both(tmp_path: Path) -> None:
    steps = [["r0"], ["r0", "r1"]]
    everything = recorded(tmp_path / "all", steps)
    by_phase = recorded(tmp_path / "phases", steps, phases="6, 9")
    by_name = recorded(tmp_path / "names", steps, names="sched.*,kv.evicted")
    both = recorded(tmp_path / "both", steps, phases="8", names="sched.*,http.*")
    assert len(everything) == 3 + 2 * 2 + 2 * 6 + 3 * 3
    assert [e.name for e in by_phase] == [e.name for e in everything if e.phase in (6, 9)]
    assert [e.name for e in by_name] == [e.name for e in everything if e.name.startswith(("sched.", "kv.ev"))]
    assert [e.name for e in both] == [e.name for e in everything if e.name.startswith("sched.")]


@given(
    st.lists(st.lists(st.sampled_from([f"r{i}" for i in range(8)]), max_size=3, unique=True), min_size=1, max_size=12),
    st.floats(0.05, 0.95),
)
def test_a_request_is_there_whole_or_not_at_all_and_its_steps_with_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[str]], sample: float
) -> None:
    folder = tmp_path_factory.mktemp("sampled")
    everything, sampled = recorded(folder / "a", steps), recorded(folder / "s", steps, sample=sample)
    kept = {e.req for e in sampled if e.req is not None}
    kept_steps = {n for n, ids in enumerate(steps, start=1) if kept & set(ids)}

    def said(event: Any) -> tuple:
        return event.name, event.ph, event.req, event.step, event.args

    expected, step = [], 0
    for e in everything:
        step = e.step or step
        evicted = e.name == "kv.evicted"
        if (
            e.phase < 6
            or e.req in kept
            or (e.req is None and (e.step in kept_steps or (evicted and step in kept_steps)))
        ):
            expected.append(said(e))
    assert [said(e) for e in sampled] == expected
    assert [e.seq for e in sampled] == list(range(1, len(sampled) + 1))


@given(st.lists(st.uuids(), min_size=200, max_size=200, unique=True), st.sampled_from([0.1, 0.5, 0.9]))
def test_about_the_share_is_kept_and_every_process_decides_alike(ids: list[Any], sample: float) -> None:
    def keeps(request_id: str) -> bool:
        recorder = Recorder()
        recorder.hold("x")
        recorder._filter = EventFilter(sample=sample)
        return recorder.emit("sched.queued", req=request_id) is not None

    kept = [i for i in ids if keeps(f"cmpl-{i.hex}-0")]
    assert abs(len(kept) / 200 - sample) < 0.2
    for i in ids[:20]:
        family = [f"cmpl-{i.hex}-1", f"3_cmpl-{i.hex}-0", f"beam0.7_cmpl-{i.hex}-0"]
        assert {keeps(each) for each in family} == {i in kept}


@pytest.mark.parametrize(
    ("request_id", "root"),
    [
        ("cmpl-ab-0", "cmpl-ab"), ("chatcmpl-ab-12", "chatcmpl-ab"), ("2_cmpl-a-b-3", "cmpl-a-b"), ("beam1.4_cmpl-ab-0", "cmpl-ab"),
        ("r7", "r7"), ("0_r7", "r7"), ("beam0.0_r7", "r7"), ("mine-7", "mine-7"), ("cmpl-7_x-2-0", "cmpl-7_x-2"),
        ("msg_a-1f-0", "msg_a-1f"), ("0_resp_ab-0", "resp_ab"), ("embd-ab-3", "embd-ab"), ("invocation-ab-0", "invocation-ab"),
    ],
)  # fmt: skip
def test_the_root_of_an_id(request_id: str, root: str) -> None:
    assert root_of(request_id) == root


@pytest.mark.parametrize("path", PREFIXES)
def test_the_ids_of_every_path_have_a_root_and_a_short_form(path: str) -> None:
    assert len(PREFIXES) == 14
    assert root_of(f"{PREFIXES[path]}mine-0123abcd-0") == f"{PREFIXES[path]}mine-0123abcd"
    assert short_id(f"{PREFIXES[path]}mine-0123abcd-0") == "mine"
    assert short_id(f"1_{PREFIXES[path]}{'0123abcd' * 4}-2") == "1_0123abcd#2"


def test_request_patterns_take_the_id_or_the_root(tmp_path: Path) -> None:
    steps = [["cmpl-a-0", "cmpl-b-0"], ["0_cmpl-a-1"], ["cmpl-b-0"]]
    events = recorded(tmp_path, steps, requests="cmpl-a,nobody")
    assert {e.req for e in events} == {None, "cmpl-a-0", "0_cmpl-a-1"} and {e.step for e in events} == {None, 1, 2}


def test_the_front_end_knows_kept_steps_by_their_cause(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.open(str(tmp_path), events=EventFilter(requests="a"))
    assert recorder.emit("zmq.outputs_received", step=1, cause=None) is None
    assert recorder.emit("zmq.outputs_received", step=2, cause="7:7") is not None
    recorder.close()


def test_what_waits_for_a_verdict_is_bounded(tmp_path: Path) -> None:
    events = EventFilter(sample=0.5)
    recorder = Recorder()
    recorder.open(str(tmp_path), events=events)
    for step in range(1, 20_000):
        recorder.emit("engine.step", ph="B", step=step)
        recorder.emit("sched.queued", req=f"r{step}")
    assert len(events._waiting) <= 1 and len(events._kept_requests) <= 4096 and len(events._kept_steps) <= 4096
    recorder.close()


def test_the_header_says_what_is_missing(tmp_path: Path) -> None:
    for number, (flags, said) in enumerate([
        ({}, {}), ({"sample": 1.0}, {}), ({"phases": "8,7", "sample": 0.5}, {"phases": [7, 8], "sample": 0.5}),
        ({"names": "kv.*", "requests": "a, b"}, {"names": ["kv.*"], "requests": ["a", "b"]}),
    ]):  # fmt: skip
        recorder = Recorder()
        recorder.open(str(tmp_path / str(number)), events=EventFilter(**flags))
        recorder.close()
        assert read_run(tmp_path / str(number)).events[0].args["filter"] == said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trace_phases": "7,10"}, "trace_phases: '10' is not a phase; give numbers from 1 to 9, such as 7,8"),
        ({"trace_phases": "0"}, "trace_phases: '0' is not a phase"),
        ({"trace_phases": ","}, "trace_phases: ',' is not a phase"),
        ({"trace_names": "shed.admit"}, "trace_names: 'shed.admit' matches no event; did you mean sched.admit?"),
        ({"trace_names": "sched.*,kvs.*"}, "trace_names: 'kvs.*' matches no event; did you mean kv.*?"),
        ({"trace_names": "zzz"}, "trace_names: 'zzz' matches no event; names look like sched.admit"),
        ({"trace_names": " "}, "trace_names: ' ' matches no event"),
        ({"trace_requests": " , "}, "trace_requests: ' , ' holds no pattern"),
        ({"trace_sample": 0.0}, "trace_sample: 0.0 is not a share of the requests"),
        ({"trace_sample": -0.1}, "trace_sample: -0.1 is not a share of the requests"),
        ({"trace_sample": 1.5}, "trace_sample: 1.5 is not a share of the requests"),
        ({"trace_sample": float("nan")}, "--trace-sample: nan is not a finite number"),
        ({"trace_max_bytes": 0}, "trace_max_bytes must be at least 65536, not 0"),
        ({"trace_max_bytes": -5}, "trace_max_bytes must be at least 65536, not -5"),
    ],
)  # fmt: skip
def test_impossible_flags_are_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs.from_kwargs(**SMALL, **flags)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
