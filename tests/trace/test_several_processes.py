"""Recordings of several workers and several engines: every tool knows who is who, and mixes nothing up."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stage03_engine.replay.replay import replay
from stagetrace import Event, read_run, tell
from stagetrace.__main__ import main
from stagetrace.check.difference import compare
from stagetrace.check.invariants import Report, check
from stagetrace.check.reasons import explain, find_request, time_of_step
from stagetrace.errors import TraceError
from stagetrace.export.perfetto import PerfettoWriter
from stagetrace.export.request_parts import HttpRequest, gather
from stagetrace.figures import block_map_table, process_lanes_table, request_timeline_table, token_budget_table
from stagetrace.read.latency import of_request
from stagetrace.read.reader import Recording
from stagetrace.read.story import one_engine
from stagetrace.read.walk import Walk

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
TP, PP, DP, DEATH = (RECORDED / name for name in ("tp2", "pp2", "dp2", "dp2_death"))
ALL = [TP, PP, DP, DEATH]
Line = dict[str, Any]


@cache
def events_of(folder: Path) -> list[Event]:
    return read_run(folder).events


@cache
def pids(folder: Path) -> dict[str, list[int]]:
    """Lane -> its processes, in the order in which they began."""
    found: dict[str, list[int]] = defaultdict(list)
    for pid, name in tell(events_of(folder)).processes.items():
        found[name].append(pid)
    return found


def printed(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    assert main([str(word) for word in argv]) == code
    return capsys.readouterr().out


# Lanes, and what links them


def test_every_rank_is_a_lane_with_its_own_file() -> None:
    front = {"APIServer"}
    assert set(pids(TP)) == front | {"EngineCore_DP0", "Worker_TP0", "Worker_TP1"}
    assert set(pids(PP)) == front | {"EngineCore_DP0", "Worker_PP0_TP0", "Worker_PP1_TP0"}
    assert set(pids(DP)) == set(pids(DEATH)) == front | {"EngineCore_DP0", "EngineCore_DP1"}
    assert {name: len(of) for name, of in pids(DEATH).items()}["EngineCore_DP0"] == 2, "it was started again"
    for folder in ALL:
        for path in folder.iterdir():
            name, _, pid = path.stem.rpartition("-")
            assert int(pid) in pids(folder)[name]


@pytest.mark.parametrize("folder", [TP, PP], ids=lambda path: path.name)
def test_what_crosses_between_engine_and_workers_is_linked(folder: Path) -> None:
    by_ref = {event.ref: event for event in events_of(folder)}
    senders = {"worker.step_received": "executor.step_sent", "executor.output_received": "worker.output_sent"}
    steps: dict[str, Counter[int | None]] = defaultdict(Counter)
    for event in events_of(folder):
        if event.name in senders:
            sent = by_ref[event.cause or ""]
            assert (sent.name, sent.step, sent.args["bytes"]) == (senders[event.name], event.step, event.args["bytes"])
        if event.name in senders or event.name in senders.values():
            steps[event.name][event.step] += 1
    assert set(steps["worker.step_received"].values()) == {2}, "both workers, every step"
    for name in ("executor.step_sent", "worker.output_sent", "executor.output_received"):
        assert set(steps[name].values()) == {1} and steps[name].keys() == steps["worker.step_received"].keys()


def test_collectives_are_spans_with_bytes_and_the_step_that_they_belong_to() -> None:
    layers = 6
    for step in range(1, 9):
        ends = [e for e in events_of(TP) if e.name == "worker.collective" and e.ph == "E" and e.step == step]
        counts = Counter((e.proc, e.args["kind"]) for e in ends)
        assert set(counts.values()) == {2 * layers + 1, 1} and len(counts) == 4
        assert all(e.args["bytes"] > 0 for e in ends)
    sends = {
        e.ref: e for e in events_of(PP) if e.name == "worker.collective" and e.args["kind"] == "send" and e.ph == "B"
    }
    receipts = [
        e for e in events_of(PP) if e.name == "worker.collective" and e.args["kind"] == "receive" and e.ph == "E"
    ]
    assert len(receipts) == len(sends)
    in_steps = [e for e in receipts if e.step is not None]
    assert in_steps and all(sends[e.cause or ""].step == e.step for e in in_steps)
    assert all(sends[e.cause or ""].args["bytes"] == e.args["bytes"] for e in in_steps)


def test_a_pipeline_has_two_steps_in_flight() -> None:
    opened: set[int | None] = set()
    most = 0
    for event in events_of(PP):
        if event.name == "engine.step":
            (opened.add if event.ph == "B" else opened.discard)(event.step)
            most = max(most, len(opened))
    assert most == 2


# check


def test_check_finds_nothing() -> None:
    for folder in (TP, PP, DP):
        assert check(folder).consistent, [str(finding) for finding in check(folder).findings]


def test_check_explains_the_death_of_one_of_two_engines() -> None:
    report = check(DEATH)
    [death] = report.deaths
    assert str(pids(DEATH)["EngineCore_DP0"][0]) in death and "dp.engine_lost" not in death
    assert report.findings and all("EngineCore_DP0" in finding.explained for finding in report.findings)
    assert not any("queued in EngineCore_DP1" in finding.text for finding in report.findings), (
        "it runs again: that is no fault"
    )


def changed(folder: Path, tmp_path: Path, lane: str, change: Callable[[list[Line]], list[Line]]) -> Report:
    """What `check` says after a change to one lane's lines, whose numbers stay without gaps."""
    copy = tmp_path / "changed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    [path] = copy.glob(f"{lane}-*.jsonl")
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check(copy)


def without(*names: str, step: int = 3, **args: Any) -> Callable[[list[Line]], list[Line]]:
    """Drop the events of these names of one step, with these arguments. The number of a dropped event is missing."""

    def change(lines: list[Line]) -> list[Line]:
        kept = [
            line
            for line in lines
            if not (line["name"] in names and line.get("step") == step and args.items() <= line["args"].items())
        ]
        assert len(kept) < len(lines)
        return kept

    return change


def with_args(name: str, step: int | None, **args: Any) -> Callable[[list[Line]], list[Line]]:
    """Change arguments, or the cause, of the last event of this name."""

    def change(lines: list[Line]) -> list[Line]:
        line = [line for line in lines if line["name"] == name and line.get("step") == step][-1]
        if "cause" in args:
            line["cause"] = args["cause"]
        else:
            line["args"] |= args
        return lines

    return change


@pytest.mark.parametrize(
    ("folder", "lane", "change", "words"),
    [
        (TP, "Worker_TP1", without("worker.step_received"), "1 of 2 workers received step 3"),
        (TP, "EngineCore_DP0", without("executor.output_received"), "step 3 was sent to the workers and never answered"),
        (TP, "Worker_TP1", with_args("worker.step_received", 3, cause="1:1"), "received step 3, which 1:1 did not send it"),
        (TP, "EngineCore_DP0", with_args("executor.output_received", 3, cause="1:1"), "has the output of step 3, which 1:1 did not send"),
        (TP, "Worker_TP1", with_args("worker.collective", 3, bytes=7), "all_gather of 7 bytes"),
        (TP, "Worker_TP0", without("worker.collective", kind="all_gather"), "that another worker did not make with it"),
        (PP, "Worker_PP1_TP0", without("worker.collective", kind="receive"), "send of"),
        (PP, "Worker_PP1_TP0", with_args("worker.collective", 3, bytes=7), "receive of 7 bytes"),
        (DP, "APIServer", lambda lines: [line for line in lines if line["name"] != "dp.routed"], "was not routed to any engine"),
        (DP, "APIServer", with_args("dp.routed", None, engine=0), "but was routed to engine 0"),
    ],
)  # fmt: skip
def test_check_notices_what_is_wrong(folder: Path, lane: str, change: Any, words: str, tmp_path: Path) -> None:
    texts = [finding.text for finding in changed(folder, tmp_path, lane, change).findings]
    assert any(words in text for text in texts), texts


def test_check_notices_a_request_that_two_engines_have(tmp_path: Path) -> None:
    report = changed(
        DEATH, tmp_path, "APIServer", lambda lines: [line for line in lines if line["name"] != "dp.engine_lost"]
    )
    assert any("is queued in EngineCore_DP1" in finding.text for finding in report.findings)


# replay


def test_each_engine_is_replayed_by_itself(tmp_path: Path) -> None:
    """What the merged recording gives for an engine is what its own file gives."""
    for folder in ALL:
        merged = replay(folder)
        assert [result.proc for result in merged] == sorted(result.proc for result in merged)
        assert all(result.difference is None for result in merged)
        for result in merged:
            alone = tmp_path / f"{folder.name}-{result.pid}"
            alone.mkdir()
            shutil.copy(folder / f"{result.proc}-{result.pid}.jsonl", alone)
            assert replay(alone) == [result]
    assert [r.proc for r in replay(DP, engine=1)] == ["EngineCore_DP1"]
    assert [r.pid for r in replay(DEATH, engine=0)] == pids(DEATH)["EngineCore_DP0"]
    with pytest.raises(TraceError, match=r"--engine 2: .* \(it has 0, 1\)"):
        replay(DP, engine=2)


# diff


def again(folder: Path, target: Path, seed: int) -> Path:
    """The same run once more: other pids, other random parts of ids, and engines that began in the other order."""
    chance = random.Random(seed)
    target.mkdir()
    story = tell(events_of(folder))
    new = {pid: 100_000 + i for i, pid in enumerate(chance.sample(sorted(story.processes), len(story.processes)))}
    suffixes = {request.split("-")[2]: f"{chance.getrandbits(32):08x}" for request in story.requests}
    late = chance.choice([pid for pid, name in story.processes.items() if name.startswith("EngineCore")])
    first = min(e.ts for e in events_of(folder) if e.name == "http.request")
    for path in folder.iterdir():
        pid = int(path.stem.rpartition("-")[2])
        text = path.read_text()
        for before, after in suffixes.items():
            text = text.replace(before, after)
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            line["pid"] = new[pid]
            if "cause" in line:
                cause, _, seq = line["cause"].partition(":")
                line["cause"] = f"{new[int(cause)]}:{seq}"
            if "pid" in line.get("args", {}):
                line["args"]["pid"] = new[line["args"]["pid"]]
            if pid == late and line["ts"] < first:
                line["ts"] += 1_000_000
        (target / path.name.replace(str(pid), str(new[pid]))).write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    return target


@pytest.mark.parametrize("folder", ALL, ids=lambda path: path.name)
def test_the_same_run_twice_has_no_difference(folder: Path, tmp_path: Path) -> None:
    for seed in range(3):
        result = compare(folder, again(folder, tmp_path / str(seed), seed))
        assert result.same and not result.settings and result.num_steps[0] == result.num_steps[1]


def test_diff_names_the_engine_that_decided_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def one_less(lines: list[Line]) -> list[Line]:
        return with_args("sched.scheduled", 5, num_tokens=7)(lines)

    changed(DP, tmp_path, "EngineCore_DP1", one_less)
    out = printed(capsys, "diff", DP, tmp_path / "changed", "--only", "engine", code=1)
    assert "step 5 of engine 1 is the first that differs" in out and "engine 0" not in out


def test_diff_says_that_one_recording_has_more_engines(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "diff", RECORDED / "prefix_hits", DP, code=1)
    assert "engines of A: EngineCore_DP0" in out and "engines of B: EngineCore_DP0, EngineCore_DP1" in out
    assert "they differ in the number of engines" in out


# why


def test_why_tells_the_story_of_a_request_that_ran_again(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.strip() for line in printed(capsys, "why", DEATH, "--req", "r2").splitlines()]
    story = ["sent to engine 0", "engine 0 died", "sent to engine 1, to begin again"]
    places = [lines.index(line) for line in story]
    assert places == sorted(places) and places[1] - places[0] > 1, "it had been computed on engine 0"
    assert lines[-1].endswith("ended: length") and any("admitted" in line for line in lines[places[2] :])
    request = find_request(DEATH, "-r2-")
    texts = [reason.text for step in explain(DEATH, request) for reason in step.reasons if not step.step]
    assert "2 of its requests run again on another one, 0 end with an error" in texts[1]
    assert "begins again there" in texts[2]
    engines = {step.process: step.engine for step in explain(DEATH, request) if step.step}
    assert engines == {
        "EngineCore_DP0": pids(DEATH)["EngineCore_DP0"][0],
        "EngineCore_DP1": pids(DEATH)["EngineCore_DP1"][0],
    }


def test_why_names_the_engine_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert "in step 3 of EngineCore_DP1" in printed(capsys, "why", DP, "--req", "r1", "--step", "3")
    assert "EngineCore" not in printed(capsys, "why", RECORDED / "mixed", "--req", "r1", "--step", "3")


def test_why_says_who_waited_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "why", TP, "--req", "r1", "--step", "3")
    assert "13 all_reduce" in out and "1 all_gather" in out and "which came last: that is waiting" in out
    out = printed(capsys, "why", PP, "--req", "r0", "--step", "3")
    assert "Worker_PP1_TP0 waited" in out and "for the hidden states of the stage before it" in out
    assert time_of_step(DP, pids(DP)["EngineCore_DP0"][0], 3) == [], "an engine that is its own worker waits for nobody"


# stats, show, step


def test_stats_are_those_of_each_engine_and_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = json.loads(printed(capsys, "stats", DP, "--json"))
    steps = Counter(e.proc for e in events_of(DP) if e.name == "engine.step" and e.ph == "E")
    assert {each["process"]: each["steps"] for each in numbers["engines"]} == steps
    assert numbers["engine"]["steps"] == sum(steps.values()) and numbers["workers"] == []
    numbers = json.loads(printed(capsys, "stats", TP, "--json"))
    for worker in numbers["workers"]:
        mine = [
            e for e in events_of(TP) if e.pid == worker["pid"] and e.name == "worker.collective" and e.step is not None
        ]
        for kind, total in worker["exchanges"].items():
            ends = [e for e in mine if e.args["kind"] == kind and e.ph == "E"]
            begins = [e for e in mine if e.args["kind"] == kind and e.ph == "B"]
            took = sum(e.ts for e in ends) - sum(e.ts for e in begins)
            assert total == {"count": len(ends), "ns": took, "bytes": sum(e.args["bytes"] for e in ends)}
    out = printed(capsys, "stats", TP)
    assert "all_gather" in out and "Worker_TP1" in out and "waits for its workers" in out
    out = printed(capsys, "stats", DEATH)
    assert f"EngineCore_DP0 ({pids(DEATH)['EngineCore_DP0'][0]})" in out and "EngineCore_DP1" in out


def test_the_tokens_of_a_request_that_ran_again_count_once() -> None:
    story = tell(events_of(DEATH))
    again = story.requests[find_request(DEATH, "-r0-")]
    computed = [e for e in events_of(DEATH) if e.req == again.request_id and e.name == "sched.token"]
    assert len(computed) > 80 == again.num_output_tokens == len(again.token_ns) == len(again.delivery.tokens)
    latency = of_request(again)
    assert latency.num_tokens == 80 and sum(latency.ttft.values()) == latency.ttft_ns
    assert len(again.engines) == 2 and [span.kind for span in again.spans].count("wait") == 2
    assert all(one.end_ns <= other.start_ns for one, other in zip(again.spans, again.spans[1:]))


def test_show_tells_which_engine_died(capsys: pytest.CaptureFixture[str]) -> None:
    own, other = printed(capsys, "show", DEATH, "--req", "r0"), printed(capsys, "show", DEATH, "--req", "r1")
    assert "dp.engine_lost engine=0" in own and "dp.resumed engine=1" in own
    assert "dp.routed engine=1" in other and "dp.engine_lost" not in other


def test_step_shows_the_state_of_the_event_s_own_engine(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("s 3 1\ns 3 0\ns 3\ns 900 1\n"))
    out = printed(capsys, "step", DP)
    assert out.count("EngineCore_DP1: step 3 |") == 1 and out.count("EngineCore_DP0: step 3 |") == 2
    assert "no step 900 of engine 1" in out


def test_a_state_of_several_engines_is_that_of_each_alone() -> None:
    merged = Walk(Recording(DP))
    merged.from_start(lambda place: False)
    last: dict[int, Any] = {}
    merged.from_start(lambda place: bool(last.update({place.engine: place.state})))  # update gives None: to the end
    for pid in (pid for name, of in pids(DP).items() if name.startswith("EngineCore") for pid in of):
        own = [e for e in events_of(DP) if e.pid == pid]
        state = type(last[pid])()
        for event in own:
            state = state.after(event)
        assert last[pid] == state


def test_each_of_two_api_servers_gets_a_message_with_its_own_tokens() -> None:
    """A step that has tokens for both is sent twice, and received at different times."""
    first, second, engine = 1, 2, 3

    def event(seq: int, pid: int, name: str, req: str | None = None, step: int | None = None, **args: Any) -> Event:
        return Event(1, seq, seq * 10, pid, f"P{pid}", "i", name, 6, "x.py:1", req, step, args.pop("cause", None), args)

    ask = {"method": "POST", "path": "/", "trace_id": None, "parent_id": None}
    token = {"num_tokens": 1, "sampled": 1, "num_output_tokens": 1, "token_ids": [], "block_hashes": []}
    sent = [event(seq, engine, "zmq.outputs_sent", step=1, num_outputs=1, bytes=9) for seq in (5, 6)]
    events = [
        event(1, first, "http.request", "r0", **ask),
        event(2, second, "http.request", "r1", **ask),
        event(3, engine, "sched.token", "r0", 1, **token),
        event(4, engine, "sched.token", "r1", 1, **token),
        *sent,
        event(7, second, "zmq.outputs_received", step=1, num_outputs=1, cause=sent[1].ref),
        event(9, first, "zmq.outputs_received", step=1, num_outputs=1, cause=sent[0].ref),
    ]
    story = tell(events)
    received = {name: [token.received_ns for token in r.delivery.tokens] for name, r in story.requests.items()}
    assert received == {"r0": [90], "r1": [70]}


# Perfetto, OTLP, CSV, figures


def perfetto(folder: Path) -> list[Line]:
    file = io.BytesIO()
    PerfettoWriter(file).write(events_of(folder))
    records: list[Line] = json.loads(file.getvalue())["traceEvents"]
    return records


@pytest.mark.parametrize("folder", [TP, PP], ids=lambda path: path.name)
def test_perfetto_has_a_track_for_each_lane_and_arrows_between_them(folder: Path) -> None:
    records = perfetto(folder)
    processes = {r["pid"]: r["args"]["name"] for r in records if r["ph"] == "M" and r["name"] == "process_name"}
    story = tell(events_of(folder))
    assert {pid: name for pid, name in processes.items() if name != "requests"} == story.processes
    arrows: dict[int, list[int]] = defaultdict(list)
    for record in records:
        if record["ph"] in "sf":
            arrows[record["id"]].append(record["pid"])
    links = Counter((processes[start], processes[end]) for start, end in arrows.values())
    steps = len(story.steps)
    workers = [name for name in story.processes.values() if name.startswith("Worker")]
    assert all(links["EngineCore_DP0", worker] == steps for worker in workers)
    output_rank = "Worker_TP0" if folder == TP else "Worker_PP1_TP0"
    assert links[output_rank, "EngineCore_DP0"] == steps
    assert (links["Worker_PP0_TP0", "Worker_PP1_TP0"] >= steps) == (folder == PP)
    collectives = Counter(r["pid"] for r in records if r["ph"] == "B" and r["name"] == "worker.collective")
    own = [pid for pid, name in story.processes.items() if name in workers]
    assert all(
        r["tid"] == r["pid"] for r in records if r["pid"] in own and r["ph"] == "B" and r["name"] == "model.forward"
    )
    assert set(collectives) == set(own)


def test_perfetto_counts_the_blocks_of_each_engine() -> None:
    story = tell(events_of(DP))
    counted = Counter(r["pid"] for r in perfetto(DP) if r["ph"] == "C" and r["name"] == "KV-cache blocks")
    assert counted == Counter(step.engine for step in story.steps)


def test_the_messages_of_a_step_go_to_the_requests_of_its_own_engine() -> None:
    found: dict[str, int] = {}

    def done(story: Any, request: HttpRequest) -> None:
        for request_id, engine in request.engine.items():
            steps = [part.args["step"] for part in engine.parts if part.args.get("message") == "outputs"]
            found[request_id] = len(steps)
            assert len(steps) == len(set(steps))

    gather(events_of(DP), done)
    story = tell(events_of(DP))
    assert found == {request_id: request.num_output_tokens for request_id, request in story.requests.items()}


def test_tables_name_the_engine_of_a_step_and_of_a_request(tmp_path: Path) -> None:
    assert main(["export", str(DEATH), "--csv", str(tmp_path / "tables")]) == 0
    rows = [line.split(",") for line in (tmp_path / "tables" / "steps.csv").read_text().splitlines()]
    place = rows[0].index("engine_pid")
    keys = [(row[place], row[0]) for row in rows[1:]]
    assert len(keys) == len(set(keys)) > len({step for _, step in keys}), "a number alone is no key"
    assert (
        " ".join(map(str, tell(events_of(DEATH)).requests[find_request(DEATH, "-r2-")].engines))
        in (tmp_path / "tables" / "requests.csv").read_text()
    )


def test_a_figure_is_of_one_engine() -> None:
    story = tell(events_of(DP))
    own = [one_engine(story, number) for number in (0, 1)]
    assert sum(len(each.steps) for each in own) == len(story.steps)
    assert sum(len(each.blocks) for each in own) == len(story.blocks)
    for number, each in enumerate(own):
        alone = tell([e for e in events_of(DP) if e.pid not in pids(DP)[f"EngineCore_DP{1 - number}"]])
        for table in (block_map_table, token_budget_table):
            assert table(each) == table(alone)
        assert len(request_timeline_table(each).splitlines()) <= len(request_timeline_table(alone).splitlines())
    assert block_map_table(story) == block_map_table(own[0]), "the first one, if nobody chooses"
    assert process_lanes_table(story, req=find_request(DP, "-r1-"))
    with pytest.raises(TraceError, match="--engine 2"):
        one_engine(story, 2)
