"""The CSV export: the tables hold what the recording says."""

from __future__ import annotations

import csv
import json
import stat
from pathlib import Path

import pytest

from stagetrace import read_run, tell
from stagetrace.__main__ import main
from stagetrace.read.tables import EVENTS, REQUESTS, STEPS

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.iterdir()))
def test_the_tables_hold_what_the_recording_tells(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert main(["export", str(RECORDED / name), "--csv", str(folder)]) == 0
    run = read_run(RECORDED / name)
    story = tell(run.events)

    requests = rows(folder / "requests.csv")
    assert [row["request"] for row in requests] == list(story.requests) and list(requests[0]) == list(REQUESTS)
    for row, request in zip(requests, story.requests.values()):
        assert int(row["output_tokens"]) == request.num_output_tokens == len(request.token_ns)
        assert int(row["prompt_tokens"]) == request.num_prompt_tokens and row["reason"] == (request.reason or "")
        kinds = {span.kind for span in request.spans}
        parts = sum(int(row[f"{kind}_ns"]) for kind in ("wait", "prefill", "decode", "preempted"))
        assert {kind for kind in kinds if int(row[f"{kind}_ns"]) > 0} == kinds
        assert parts == request.spans[-1].end_ns - int(row["queued_ns"]), "a request is always in one of its spans"
        assert (
            int(row["first_event_ns"])
            <= int(row["queued_ns"])
            <= int(row["first_token_ns"])
            <= int(row["first_chunk_ns"] or row["last_event_ns"])  # a whole answer has no chunks
        )

    complete = sorted((step for step in story.steps if step.end_ns), key=lambda step: (step.engine, step.step))
    steps = sorted(rows(folder / "steps.csv"), key=lambda row: (int(row["engine_pid"]), int(row["step"])))
    assert [(int(row["engine_pid"]), int(row["step"])) for row in steps] == [(s.engine, s.step) for s in complete]
    assert list(steps[0]) == list(STEPS)
    for row, step in zip(steps, complete):
        assert int(row["scheduled_tokens"]) == sum(s.num_tokens + s.num_drafts for s in step.scheduled.values())
        assert int(row["new_tokens"]) == sum(step.tokens.values()) and int(row["free_blocks"]) == step.free_blocks
        assert row["preempted"].split() == list(step.preempted) and row["admitted"].split() == step.admitted
        assert int(row["start_ns"]) <= int(row["forward_start_ns"]) <= int(row["forward_end_ns"]) <= int(row["end_ns"])

    events = rows(folder / "events.csv")
    assert list(events[0]) == list(EVENTS)
    assert [(row["pid"], row["seq"]) for row in events] == [tuple(e.ref.split(":")) for e in run.events]
    assert [json.loads(row["args"]) for row in events] == [e.args for e in run.events]


def test_one_table_alone_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(RECORDED / "one_request")
    assert main(["export", run, "--csv", str(tmp_path / "steps.csv")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["steps.csv"]
    for wrong in (tmp_path / "other.csv", tmp_path / "no" / "folder", tmp_path / "no" / "steps.csv"):
        assert main(["export", run, "--csv", str(wrong)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_what_is_exported_is_for_its_owner_alone(tmp_path: Path) -> None:
    words = ["--csv", "t", "--html", "h", "--perfetto", "p", "--otlp", "o"]
    words = [word if word.startswith("-") else str(tmp_path / word) for word in words]
    assert main(["export", str(RECORDED / "one_request"), *words]) == 0
    made = [*tmp_path.iterdir(), *(tmp_path / "t").iterdir()]
    assert len(made) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {0o600}
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o700
