"""`stages trace` and `python -m stagetrace`: help, and errors in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stage01_cli.main import main as stages
from stagetrace.__main__ import main as stagetrace
from stagetrace.commands import COMMANDS

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
PROGRAMS = {
    "stages": lambda *words: stages(["trace", *words]),
    "stagetrace": lambda *words: stagetrace(words),
}
program = pytest.mark.parametrize("name", PROGRAMS)


@program
def test_without_a_command_there_is_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS[name]() == 2
    text = capsys.readouterr().err
    assert "usage:" in text and all(command in text for command in COMMANDS)


@program
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[name](command, "--help")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@program
@pytest.mark.parametrize("command", ["view", "show", "step", "stats"])
def test_folders_that_are_no_recordings(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("empty", "blank", "foreign"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blank" / "x.jsonl").touch()
    (tmp_path / "foreign" / "x.jsonl").write_text('{"hello": 1}\n{"hello": 2}\n', encoding="utf-8")
    cases = {
        str(tmp_path / "nowhere"): "no trace in",
        str(tmp_path / "empty"): "no trace in",
        str(tmp_path / "blank"): "no events in",
        str(tmp_path / "foreign"): "not a trace event",
        str(RECORDED): "choose one: ",
        __file__: "no trace in",
    }
    for folder, message in cases.items():
        assert PROGRAMS[name](command, folder) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err and err.startswith(f"{name}: error: ")


@program
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["view"], "RUN"),
        (["vieww", "x"], "vieww"),
        (["view", "mixed", "--phase", "x"], "--phase x: expected"),
        (["view", "mixed", "--step", "5-"], "--step 5-: expected"),
        (["view", "mixed", "--name", "sched.nothing*"], "no event has such a name"),
        (["view", "mixed", "--limit", "0"], "expected a number above 0"),
        (["view", "mixed", "--nothing"], "--nothing"),
        (["show", "mixed", "--req", "r"], "matches several requests"),
        (["show", "mixed", "--req", "nobody"], "no such request in this recording (it has r0, r1"),
    ],
)
def test_wrong_words(name: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS[name](*[str(RECORDED / word) if word == "mixed" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_who_reads_may_stop_reading() -> None:
    command = f"{sys.executable} -m stagetrace view {RECORDED / 'mixed'} | head -1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)


def test_a_terminal_without_unicode_gets_ascii() -> None:
    command = [sys.executable, "-m", "stagetrace", "view", str(RECORDED / "one_request")]
    result = subprocess.run(
        command, capture_output=True, env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    )
    assert result.returncode == 0 and b">zmq.request_received" in result.stdout and result.stdout.isascii()
