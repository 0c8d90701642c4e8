"""What a person at a terminal of 80 columns sees of every command: whole words, colours where there are any, and a quiet end behind `head`."""

from __future__ import annotations

import argparse
import ast
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import fork_start
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stage01_cli.main import COMMANDS, make_parser
from stage03_engine.llm import LLM
from stagetrace import terminal
from stagetrace.terminal import folded, shortened

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "trace/recorded/preemption")
COLUMNS = 80
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")

REAL: dict[tuple[str, ...], list[str]] = {
    ("serve",): ["gpt2-tiny", "--dry-run"],
    ("chat",): ["--url", "URL", "-q", "To be"],
    ("complete",): ["--url", "URL", "-q", "To be"],
    ("trace", "view"): [RUN],
    ("trace", "show"): [RUN, "--req", "r5"],
    ("trace", "step"): [RUN],
    ("trace", "stats"): [RUN],
    ("trace", "why"): [RUN, "--req", "r5"],
    ("trace", "diff"): [RUN, str(ROOT / "trace/recorded/mixed")],
    ("trace", "check"): [RUN],
    ("trace", "figure"): [RUN, "request_timeline", "--table"],
    ("trace", "replay"): [RUN],
    ("collect-env",): [],
    ("bench", "latency"): ["--model", "gpt2-tiny", "--num-iters", "1", "--num-iters-warmup", "0", "--output-len", "2"],
    ("course", "list"): ["--work", "WORK"],
    ("course", "progress"): ["--work", "WORK"],
    ("course", "start"): ["5", "--work", "WORK", "--again"],
    ("course", "hint"): ["5", "--work", "WORK"],
    ("course", "check"): ["5", "--work", "WORK"],
    ("walk",): ["To be"],
    ("napkin",): [],
}
"""A command -> words with which it prints."""
HELP_ALONE = {
    ("run-batch",): "prints on standard error",
    ("trace", "play"): "prints a line, after a browser was asked for",
    ("trace", "export"): "prints a line, after files were written",
    ("bench", "serve"): "prints as the others of bench",
    ("bench", "throughput"): "prints as the others of bench",
    ("bench", "startup"): "prints as the others of bench",
    ("course", "serve"): "prints as check, after two servers have served",
    ("course", "compare"): "prints as check, after two servers have served",
    ("course", "handout"): "prints a line, after the project was copied",
    ("course", "grade"): "prints as check, after judges in sandboxes",
    ("course", "leaderboard"): "prints as check, after servers have served",
    ("lab",): "prints a line, and serves until Ctrl-C",
    ("router",): "prints a line, and serves until Ctrl-C",
    ("book",): "prints what sphinx says",
}
"""A command of which only the help is tried -> why."""


def commands(parser: argparse.ArgumentParser, name: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The commands below this one, or itself."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name
    for action in below:
        for word, each in action.choices.items():
            yield from commands(each, (*name, word))


def all_commands() -> list[tuple[str, ...]]:
    found = []
    for word in COMMANDS:
        (action,) = (each for each in make_parser(word)._actions if isinstance(each, argparse._SubParsersAction))
        found += list(commands(action.choices[word], (word,)))
    return found


LONG = [("walk",), ("bench", "latency")]  # each starts an engine
TRIED = [pytest.param(each, marks=[pytest.mark.long] * (each in LONG), id=" ".join(each)) for each in REAL]


def name_of(command: tuple[str, ...]) -> str:
    return " ".join(command) or "stages"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ServerProcess("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--engine", "echo")
    yield server.wait_until_ready()
    server.close()


def environment(**more: str) -> dict[str, str]:
    """That of a person, whose Python keeps what it prints until there is enough of it."""
    left_out = {"PYTHONUNBUFFERED", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'trace'}", **more}


def in_terminal(*words: str, columns: int = COLUMNS, **more: str) -> list[str]:
    """The lines that `python -m WORDS` writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**more))
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux says so at the end
            break
        if not piece:
            break
        said += piece
        if said.endswith(b"step> "):
            os.write(ours, b"q\n")
    os.close(ours)
    process.wait(PATIENCE)
    return said.decode().replace("\r\n", "\n").splitlines()


def in_pipe(*words: str, **more: str) -> list[str]:
    command = [sys.executable, "-m", *words]
    ended = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE)
    return (ended.stdout + ended.stderr).splitlines()


def behind_head(*words: str) -> tuple[int, str]:
    """Exit code and standard error where nobody reads the output any more."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", *words]
    with fork_start.plainly():
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=PATIENCE,
        )  # fmt: skip
    os.close(writer)
    return ended.returncode, ended.stderr


def is_quiet(code: int, said: str) -> bool:
    return code in (0, 141) and "Traceback" not in said and "Exception ignored" not in said and "error" not in said


def test_every_command_is_tried() -> None:
    assert sorted([*REAL, *HELP_ALONE]) == sorted(all_commands())


@pytest.mark.slow(keep="stages")
@pytest.mark.parametrize("command", [(), *all_commands()], ids=name_of)
def test_help_behind_head_ends_quietly(command: tuple[str, ...]) -> None:
    code, said = behind_head("stage01_cli", *command, "--help")
    assert is_quiet(code, said), (code, said)


@pytest.mark.slow(keep=("trace show", "trace step", "course list"))
@pytest.mark.parametrize("command", TRIED)
def test_a_command_behind_head_ends_quietly(command: tuple[str, ...], url: str, tmp_path: Path) -> None:
    words = [{"URL": f"{url}/v1", "WORK": str(tmp_path)}.get(word, word) for word in REAL[command]]
    if command[0] == "course" and command[1] in ("hint", "check", "progress"):
        in_pipe("stage01_cli", "course", "start", "5", "--work", str(tmp_path))
    code, said = behind_head("stage01_cli", *command, *words)
    assert is_quiet(code, said), (code, said)


@pytest.mark.slow(keep="stage02")
@pytest.mark.parametrize("program", ["stagetrace", "stage02_server", "stage03_engine", "stage04_kernels"])
def test_the_other_programs_end_quietly_too(program: str) -> None:
    assert is_quiet(*behind_head(program, "--help"))


@pytest.mark.slow
def test_the_kernels_table_behind_head() -> None:
    assert is_quiet(*behind_head("stage04_kernels", "roofline"))


def wider(lines: list[str], columns: int) -> list[str]:
    """Lines that the terminal itself would break, perhaps inside a word; one word alone cannot be helped."""
    plain = [ESCAPE.sub("", line) for line in lines]
    return [line for line in plain if len(line) > columns and " " in line.strip()]


@pytest.mark.slow(keep=("course list", "course hint", "trace view", "trace why"))
@pytest.mark.parametrize("command", [each for each in TRIED if each.values[0][0] not in ("chat", "complete", "bench")])
def test_no_line_is_broken_inside_a_word(command: tuple[str, ...], tmp_path: Path) -> None:
    words = [str(tmp_path) if word == "WORK" else word for word in REAL[command]]
    if command[0] == "course" and command[1] != "start":
        in_pipe("stage01_cli", "course", "start", "5", "--work", str(tmp_path))
    lines = in_terminal("stage01_cli", *command, *words)
    assert lines and not wider(lines, COLUMNS)


@pytest.mark.parametrize("command", [(), *all_commands()], ids=name_of)
def test_help_has_whole_words(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither too wide nor broken at a hyphen, as argparse would do with the name of a flag."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit):
        make_parser(command[0] if command else None).parse_args([*command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines and not wider(lines, COLUMNS)
    assert not [line for line in lines if re.search(r"\w-$", line)]


def test_a_pipe_gets_whole_lines() -> None:
    lines = in_pipe("stage01_cli", "trace", "show", RUN, "--req", "r5")
    assert max(map(len, lines)) > COLUMNS and not any("\x1b" in line for line in lines)


COUNTS = {
    "checks": ("stage04_kernels", "check", "--only", "layers", "--only", "adapters"),
    "tests": ("stage01_cli", "course", "check", "16", "--work", "WORK"),
    "iterations": (
        "stage01_cli", "bench", "latency", "gpt2-tiny", "--num-iters", "2", "--num-iters-warmup", "0", "--output-len", "2",
    ),
}  # fmt: skip
"""What is counted -> a command that takes long."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.long] * (each == "iterations")) for each in COUNTS]
)
def test_what_takes_long_counts_in_a_terminal_alone(case: str, tmp_path: Path) -> None:
    """n of m, in a line that takes no line from what is printed, and of which a pipe or a log sees nothing."""
    shutil.copy(ROOT / "notebooks/exercises/ex16_engine/reference.py", tmp_path / "ex16_engine.py")
    words = [str(tmp_path) if word == "WORK" else word for word in COUNTS[case]]
    counts = [re.search(r"\| (\d+)/(\d+) \[[^]]*\](.*)", line) for line in in_terminal(*words)]
    found = [(int(each[1]), int(each[2])) for each in counts if each]
    assert not [each for each in counts if each and each[3]], "what is printed comes behind the count"
    assert found and found == sorted(found) and len({m for _, m in found}) == 1 and max(found)[0] > 0
    assert not [line for line in in_pipe(*words) if re.search(r"\d+/\d+ \[|\r", line)]


COLOURS = {
    "terminal": ({}, True),
    "NO_COLOR": ({"NO_COLOR": "1"}, False),
    "NO_COLOR empty": ({"NO_COLOR": ""}, True),
    "dumb": ({"TERM": "dumb"}, False),
    "dumb, forced": ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    "both": ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
}


@pytest.mark.parametrize("case", COLOURS)
def test_a_terminal_has_colours_unless_somebody_says_otherwise(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more, wanted = COLOURS[case]
    for name, value in environment(**more).items():
        monkeypatch.setenv(name, value)
    assert terminal.wants_colour(stream=Screen(True)) is wanted


@pytest.mark.slow(keep="-terminal")
@pytest.mark.parametrize("case", COLOURS)
@pytest.mark.parametrize(
    "words", [("trace", "show", RUN, "--req", "r5"), ("trace", "show", "nowhere")], ids=["story", "error"]
)
def test_colours_where_a_terminal_has_them(words: tuple[str, ...], case: str) -> None:
    more, wanted = COLOURS[case]
    assert any("\x1b[" in line for line in in_terminal("stage01_cli", *words, **more)) is wanted


def test_colours_in_a_pipe_are_forced_or_not_there() -> None:
    words = ("stage01_cli", "trace", "show", RUN, "--req", "r5")
    assert any("\x1b[" in line for line in in_pipe(*words, FORCE_COLOR="1"))
    assert in_pipe("stage01_cli", "napkin", "--chip", "x", FORCE_COLOR="1")[0].startswith("stages: error: ")


def test_one_place_decides() -> None:
    """Nobody else asks whether an output is a terminal, reads these variables, or writes escape sequences of his own."""
    allowed = {
        "trace/stagetrace/terminal.py",
        "trace/stagetrace/read/terminal.py",
    }  # the second has the colours of the phases
    wrong = []
    for stage in ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "trace/stagetrace"):
        for path in sorted((ROOT / stage).rglob("*.py")):
            name, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
            if not re.search(r"isatty|\\x1b|\\033|\\u001b|\x1b|_COLOR", source):
                continue
            for node in ast.walk(ast.parse(source)):
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                asks = isinstance(node, ast.Attribute) and node.attr == "isatty" and "stdin" not in ast.unparse(node)
                if name not in allowed and (asks or text.startswith("\x1b[") or text in ("NO_COLOR", "FORCE_COLOR")):
                    wrong.append(f"{name}:{node.lineno}")
    assert not wrong


class Screen(io.StringIO):
    """A standard error that is a terminal, or none."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize(("is_terminal", "after", "seen"), [(True, 0.0, True), (True, 1e9, False), (False, 0.0, False)])
def test_how_far_the_weights_are_is_said_in_a_terminal_if_they_take_long(
    is_terminal: bool, after: float, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal))
    monkeypatch.setattr(terminal, "COUNTED_AFTER", after)
    LLM("gpt2-tiny", linear_backend="onednn")
    for what in ("loading the weights: ", "packing the weights: "):
        assert (what in screen.getvalue()) is seen
    assert seen or not screen.getvalue()


def test_folding_keeps_every_word_and_finds_the_column() -> None:
    line = "users                        145: memory is the wall, no further context fits beside the weights"
    first, second = folded(line, 80).split("\n")
    assert second == " " * 29 + "beside the weights" and f"{first} {second.strip()}" == line
    colour = "\x1b[33m6\x1b[0m  " + "word " * 15
    assert "\n" not in folded(colour.rstrip(), 80)  # what colours is not counted
    assert folded("a" * 200, 80) == "a" * 200 and folded(f"see {'a' * 200} there", 80) == f"see\n  {'a' * 200}\n  there"


@pytest.mark.parametrize("width", range(1, 30))
def test_folding_and_shortening_at_any_width(width: int) -> None:
    line = "  a bb   ccc dddd-eee  ffffff g " + "h " * 9
    pieces = folded(line, width).split("\n")
    assert " ".join(pieces).split() == line.split()
    assert not wider(pieces, width)
    cut = shortened(line, width)
    assert line.startswith(cut.removesuffix(" …")) and (len(cut) <= max(width, 2))
