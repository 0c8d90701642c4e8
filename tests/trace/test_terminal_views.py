"""view, show and stats on recorded runs, as a user of the command line sees them."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stagetrace import Event, Recording, read_run, tell
from stagetrace.__main__ import main
from stagetrace.event import encode_line
from stagetrace.read.columns import Columns
from stagetrace.read.folding import Folding
from stagetrace.read.terminal import short_id

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]):
    """Run a command that succeeds; returns the lines that it printed."""

    def run(*words: str) -> list[str]:
        assert main(words) == 0
        return capsys.readouterr().out.splitlines()

    return run


def events_of(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r" *\d+\.\d{3} ", line)]


@pytest.mark.parametrize("run", RUNS)
def test_view_has_a_line_for_every_event_in_causal_order(run: str, command) -> None:
    events = read_run(RECORDED / run).events
    lines = events_of(command("view", str(RECORDED / run), "--unfold", "--width", "300"))  # a column for each process
    assert len(lines) == len(events)
    start = min(event.ts for event in events)
    for line, event in zip(lines, events, strict=True):
        assert event.name in line and line[12:14].strip() == str(event.phase)
        assert float(line[:11]) == pytest.approx((event.ts - start) / 1e6, abs=0.001)
        assert event.req is None or short_id(event.req) in line
        assert event.step is None or f" {event.step} " in line
    columns = {event.pid: line.index(event.name) for line, event in zip(lines, events, strict=True) if "◀" not in line}
    assert len(set(columns.values())) == len(columns) > 1  # each process its own


@pytest.mark.parametrize("run", ["tp2", "pp2"])
def test_view_folds_the_exchanges_of_a_worker_in_a_row(run: str, command) -> None:
    """Nothing else is folded, and nothing that stages send each other."""
    unfolded, folded = (events_of(command("view", str(RECORDED / run), *more)) for more in (["--unfold"], []))
    rows = [line for line in folded if "exchanges=" in line]
    assert [line for line in folded if line not in rows] == [
        line for line, event in zip(unfolded, read_run(RECORDED / run).events, strict=True) if not is_layers(event)
    ]
    found: dict[tuple[str, int, str], int] = {}
    for events in by_process(run):
        for same, group in itertools.groupby(
            events, lambda event: is_layers(event) and (event.step, event.args["kind"])
        ):
            if same:
                key = (events[0].proc, *same)
                found[key] = found.get(key, 0) + sum(event.args["bytes"] for event in group if event.ph == "B")
    assert len(rows) == len(found) and bool(found) == (run == "tp2")
    assert sum(int(re.search(r"bytes=(\d+)", line)[1]) for line in rows) == sum(found.values())
    if found:
        step = events_of(command("view", str(RECORDED / run), "--step", "1", "--name", "worker.collective"))
        assert [re.search(r"exchanges=(\d+) kind=(\w+)", line).groups() for line in step] == [
            ("13", "all_reduce"), ("13", "all_reduce"), ("1", "all_gather"), ("1", "all_gather"),
        ]  # fmt: skip


def test_a_row_of_exchanges_ends_with_its_kind_and_its_step() -> None:
    """Also where nothing comes between two rows; one that is cut off is shown with what there is."""
    made = [("all_reduce", 1), ("all_reduce", 1), ("all_gather", 1), ("all_reduce", 2)]
    events = [
        Event(1, 0, 1_000_000 * (2 * place + (ph == "E")), 7, "Worker_TP0", ph, "worker.collective", 8, "f:1", step=step, args={"kind": kind, "bytes": 10})
        for place, (kind, step) in enumerate(made)
        for ph in "BE"
    ][:-1]  # fmt: skip
    folding = Folding()
    rows = [row for event in events for row in folding.feed(event)]
    assert [(row.step, row.args["kind"], row.args["exchanges"], row.args["ms"]) for row in [*rows, *folding.finish()]] == [
        (1, "all_reduce", 2, 2.0), (1, "all_gather", 1, 1.0), (2, "all_reduce", 1, 0.0),
    ]  # fmt: skip


def is_layers(event: Event) -> bool:
    return event.name == "worker.collective" and event.args["kind"] in ("all_reduce", "all_gather")


def by_process(run: str) -> list[list[Event]]:
    events = sorted(read_run(RECORDED / run).events, key=lambda event: (event.pid, event.seq))
    return [list(group) for _, group in itertools.groupby(events, lambda event: event.pid)]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int, command) -> None:
    for line in command("view", str(RECORDED / "mixed"), "--width", str(width)):
        assert len(line) <= max(width, 60)
    if width >= 80:
        assert any(
            "╰" in line and "▶zmq.request_received" in line
            for line in command("view", str(RECORDED / "mixed"), "--width", str(width))
        )


def test_as_many_columns_as_fit_and_nobody_is_lost() -> None:
    columns = Columns(90, False)
    for pid in range(40):
        columns.add_process(pid, "P")
    places = []
    for pid in range(40):
        event = Event(1, 1, 0, pid, "P", "i", "cli.main", 1, "x:1")
        columns.note(event)
        line = columns.line(event)
        assert len(line) <= 90 and "cli.main" in line
        places.append(line.index("cli.main"))
    assert places == sorted(places) and 1 < len(set(places)) < 40


def test_colour_only_when_asked_for_and_never_alone(command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(RECORDED / "one_request")
    plain = command("view", run)
    coloured = command("view", run, "--color", "always")
    assert not any("\x1b" in line for line in plain) and any("\x1b[33m" in line for line in coloured)
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in coloured] == plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert any("\x1b" in line for line in command("view", run, "--color", "auto", "--width", "100"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("\x1b" in line for line in command("view", run, "--color", "auto", "--width", "100"))


@given(st.data())
def test_filters_keep_exactly_what_they_say(data: st.DataObject) -> None:
    import contextlib
    import io

    events = read_run(RECORDED / "mixed").events
    kept, words = events, ["view", str(RECORDED / "mixed")]
    if data.draw(st.booleans()):
        low, high = sorted(data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9))))
        words += ["--phase", f"{low}-{high}"]
        kept = [event for event in kept if low <= event.phase <= high]
    if data.draw(st.booleans()):
        words += ["--name", "sched.*", "--name", "sse.chunk"]
        kept = [event for event in kept if event.name.startswith("sched.") or event.name == "sse.chunk"]
    if data.draw(st.booleans()):
        words += ["--req", "r3"]
        kept = [event for event in kept if event.req and "-r3-" in event.req]
    if data.draw(st.booleans()):
        words += ["--proc", "Engine*"]
        kept = [event for event in kept if event.proc == "EngineCore_DP0"]
    if data.draw(st.booleans()):
        low, high = sorted(data.draw(st.tuples(st.integers(1, 50), st.integers(1, 50))))
        words += ["--step", f"{low}-{high}"]
        kept = [event for event in kept if event.step is not None and low <= event.step <= high]
    if data.draw(st.booleans()):
        limit = data.draw(st.integers(1, 30))
        words += ["--limit", str(limit)]
        kept = kept[:limit]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    lines = events_of(out.getvalue().splitlines())
    assert [event.name in line for event, line in zip(kept, lines, strict=True)] == [True] * len(kept)


@pytest.mark.parametrize(
    "words, said", [(["--req", "nobody"], True), (["--step", "900"], True), (["--req", "r3"], False)]
)
def test_a_selection_of_nothing_says_so(words: list[str], said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(RECORDED / "mixed"), *words]) == 0
    assert ("no event of this recording is selected" in capsys.readouterr().err) == said


def test_what_clients_wrote_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = Event(
        1,
        1,
        5,
        7,
        "P\x1b[1m\n",
        "i",
        "cli.main\x9b",
        8,
        "x\x1b:1",
        req="cmpl-\x1b[2J-deadbeef-0",
        step=1,
        cause="1\x1b:1",
        args={"argv": ["\x1b]0;x\x07", "a\nb"]},
    )
    odd = Event(1, 2, 6, 7, "P", "i", "sched.admit", 8, "x:1", req="a\x1b[2J\nb", step=1, args={"new_blocks": ["\x9b"]})
    (tmp_path / "P-7.jsonl").write_bytes(encode_line(evil) + encode_line(odd))
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\nn\nr a\nq\n"))
    others = (["show", "--req", "cmpl"], ["stats", "--requests"], ["why", "--req", "a"], ["diff", str(tmp_path)])
    for word, *rest in (["view"], ["show"], ["check"], ["step"], *others):
        main([word, str(tmp_path), *rest])  # whatever it finds
        for line in capsys.readouterr().out.split("\n"):
            assert line.isprintable(), (word, line)


def test_show_lists_the_requests(command) -> None:
    head, *rows = command("show", str(RECORDED / "client_abort"))
    assert head.split()[0] == "request" and [row.split()[0] for row in rows] == ["r0", "r1"]
    assert "aborted" in rows[0] and "length" in rows[1]
    assert len(command("show", str(RECORDED / "mixed"))) == 9


@pytest.mark.parametrize("run", RUNS)
def test_a_story_accounts_for_every_token_and_chunk(run: str, command) -> None:
    events = read_run(RECORDED / run).events
    for request in dict.fromkeys(event.req for event in events if event.req):
        text = "\n".join(command("show", str(RECORDED / run), "--req", request))
        mine = [event for event in events if event.req == request]
        tokens = sum(event.args["num_tokens"] for event in mine if event.name == "sched.token")
        told = sum(map(int, re.findall(r"(\d+) more token", text))) + sum(
            map(int, re.findall(r"sched.token num_tokens=(\d+)", text))
        )
        assert told == tokens
        chunks = sum(event.name == "sse.chunk" for event in mine)
        assert sum(map(int, re.findall(r"(\d+) chunks? sent", text))) + text.count("sse.chunk") == chunks
        for name in (
            "http.request",
            "sched.admit",
            "sched.preempt",
            "sched.resume",
            "sched.finished",
            "request.aborted",
        ):
            assert text.count(name) == sum(event.name == name for event in mine)
        if run != "engine_death":  # the first token's messages
            assert text.count("zmq.outputs_sent") == text.count("zmq.outputs_received") == 1
        answer = "sse.chunk" if chunks else "http.response"
        assert text.index("http.request") < text.index("zmq.request_sent") < text.index(answer)


def test_a_story_says_which_chunks_of_the_prompt_which_step_computed(command) -> None:
    text = "\n".join(command("show", str(RECORDED / "mixed"), "--req", "r1"))
    assert (
        "step 1: sched.scheduled 30 of 35 missing tokens, 0 computed before new_blocks=[2-3] (of 32 in the step)"
        in text
    )
    assert "step 2: sched.scheduled 5 of 5 missing tokens, 30 computed before" in text


def test_prompt_and_output_when_they_were_recorded(tmp_path: Path, command) -> None:
    shutil.copytree(RECORDED / "one_request", tmp_path / "run")
    file = next((tmp_path / "run").glob("API*"))
    text = file.read_text(encoding="utf-8")
    words = iter(["I", " am", " here", ".", " ", "A", "B", "C"])
    spoken = re.sub(r'"text":"(?:[^"\\]|\\.)*"', lambda _: f'"text":"{next(words)}"', text)
    assert next(words, None) is None
    file.write_text(spoken, encoding="utf-8")
    lines = command("show", str(tmp_path / "run"), "--req", "r0")
    assert "  prompt: ROMEO:" in lines and "  output: I am here. ABC" in lines
    file.write_text(re.sub(r'"(text|prompt)":"(?:[^"\\]|\\.)*"', r'"\1":null', text), encoding="utf-8")
    lines = command("show", str(tmp_path / "run"), "--req", "r0")
    assert not [line for line in lines if line.startswith(("  prompt:", "  output:"))]


def test_stats_say_the_same_as_table_and_as_json(command) -> None:
    numbers = json.loads("\n".join(command("stats", str(RECORDED / "preemption"), "--json")))
    assert len(numbers["requests"]) == 8 and numbers["engine"]["steps"] == len(
        tell(Recording(RECORDED / "preemption")).steps
    )
    for request in numbers["requests"]:
        assert (
            sum(request["ttft"].values()) == request["ttft_ns"] and sum(request["gaps"].values()) == request["gaps_ns"]
        )
    table = "\n".join(command("stats", str(RECORDED / "preemption"), "--requests"))
    mean = numbers["tpot_ns"]["parts"]["preempted"]["mean"] / 1e6
    assert re.search(rf"8  preempted +\S+% +{mean:.3f}", table)
    assert f"{numbers['engine']['steps']} steps" in table and all(f"\nr{i} " in table for i in range(8))
