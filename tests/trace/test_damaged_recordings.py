"""Recordings with a part missing: every view shows what it can, or says in one line why it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hypothesis import given, strategies as st

from stagetrace.__main__ import main
from stagetrace.commands.figure import KINDS

RECORDED = Path(__file__).parent.parent.parent / "trace" / "recorded"
SMALL = ["one_request", "preemption", "client_abort", "engine_death"]


@given(run=st.sampled_from(SMALL), data=st.data())
def test_whatever_is_missing_no_view_breaks(run: str, data: st.DataObject, tmp_path: Path) -> None:
    """A filter left events out, a crash lost the end, rotation lost the beginning, or a process was not recorded."""
    damaged = tmp_path / "run"
    shutil.rmtree(damaged, ignore_errors=True)
    damaged.mkdir()
    lines = {path.name: path.read_text().splitlines() for path in sorted((RECORDED / run).iterdir())}
    names = sorted({json.loads(line)["name"] for of_file in lines.values() for line in of_file})
    gone = data.draw(st.sets(st.sampled_from(names), max_size=4), label="gone")
    chosen = data.draw(st.sets(st.sampled_from(sorted(lines)), min_size=1), label="files")
    for name in sorted(chosen):
        first = data.draw(st.integers(0, len(lines[name]) // 2) | st.just(0), label="first")
        last = data.draw(st.integers(first + 1, len(lines[name])) | st.just(len(lines[name])), label="last")
        kept = [line for line in lines[name][first:last] if json.loads(line)["name"] not in gone]
        (damaged / name).write_text("".join(f"{line}\n" for line in kept))
    known = sorted({json.loads(line).get("req", "") for of_file in lines.values() for line in of_file} - {""})
    req = data.draw(st.sampled_from(known), label="req")
    step = str(data.draw(st.integers(1, 12), label="step"))
    commands = [
        *(["view"], ["show"], ["show", "--req", req], ["stats"], ["check"], ["why", "--req", req], ["why", "--req", req, "--step", step]),
        *(["diff", str(RECORDED / run)], ["export", "--perfetto", str(tmp_path / "x.json")], ["export", "--html", str(tmp_path / "x.html")]),
        *(["figure", kind, "--table"] for kind in KINDS),
    ]  # fmt: skip
    for command in data.draw(st.lists(st.sampled_from(commands), min_size=4, max_size=4), label="commands"):
        assert main([command[0], str(damaged), *command[1:]]) in (0, 1, 2)  # and no exception
