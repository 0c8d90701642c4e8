"""`stages course serve` with a part that misbehaves: what hangs, prints without end or leaves a process behind; and an exercise.toml
that is wrong. No real server here: a process that writes what one writes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE, wait_until

from stage01_cli.tools import own_server
from stage01_cli.tools.course import exercises, load, serving
from stage01_cli.tools.course.load import SilentError, ask_all, asks
from stage01_cli.tools.own_server import MARK, OwnServer
from stage03_engine.errors import ConfigError, EngineStartError

READY = "print('Serving on http://127.0.0.1:9', file=sys.stderr, flush=True)"
PART = Path("ex05_scheduler.py")


def started(code: str) -> OwnServer:
    """A process in the place of a server."""
    command = [sys.executable, "-c", f"import os, signal, sys\n{code}"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    return OwnServer(process)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_of_a_log_without_end_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "LOG_LINES", 5)
    monkeypatch.setattr(own_server, "LOG_WIDTH", 100)
    code = f"{READY}\nfor n in range(2000): print('x' * 1000, n, file=sys.stderr)\n"
    code += f"print('{MARK} a door', file=sys.stderr)\nfor n in range(9): print(n, file=sys.stderr)"
    code += "\nprint('y' * 250, file=sys.stderr)"
    server = started(code)
    server.process.wait(PATIENCE)
    server.stop()
    server.close()
    assert server.log == ["7", "8", "y" * 100, "y" * 100, "y" * 50] and server.marked == [f"{MARK} a door"]


def test_a_process_that_the_part_has_left_behind_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the log open, and hears no SIGTERM."""
    monkeypatch.setattr(own_server, "LINGER_SECONDS", 0.1)
    code = f"child = os.fork()\nif not child:\n    signal.pause()\nprint(child, file=sys.stderr)\n{READY}"
    server = started(code)
    child = int(server.log[0])
    monkeypatch.setattr(own_server, "PATIENCE", 5.0)  # so that this fails soon without what it tests
    server.process.wait(PATIENCE)
    server.stop()
    wait_until(lambda: gone(child), "the child has ended")
    server.close()


class Hanging(BaseHTTPRequestHandler):
    """Begins each answer, and never goes on while its `process` lives."""

    asked: threading.Semaphore
    process: subprocess.Popen[str]

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.asked.release()
        self.process.wait(PATIENCE)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hanging() -> Iterator[OwnServer]:
    server = started(f"{READY}\nsignal.pause()")
    Hanging.process, Hanging.asked = server.process, threading.Semaphore(0)
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Hanging)
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{stub.server_port}"
    yield server
    server.stop()
    server.close()
    stub.shutdown()
    stub.server_close()


LOAD = asks([{"prompt": "a"}, {"prompt": "b"}])


def test_ctrl_c_ends_a_server_that_hangs_and_waits_for_no_client(
    hanging: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(*_: object) -> None:
        for _ in LOAD:
            assert Hanging.asked.acquire(timeout=PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "wait", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        ask_all(hanging, LOAD)
    assert hanging.process.wait(PATIENCE) == -9


def test_a_part_that_loops_is_said_to_do_so(hanging: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SILENCE", 0.0)
    with pytest.raises(SilentError):
        ask_all(hanging, LOAD)
    assert hanging.process.wait(PATIENCE) == -9


def test_whoever_serves_a_part_that_loops_hears_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise SilentError("no answer went on")

    monkeypatch.setattr(serving, "serving", silent)
    with pytest.raises(EngineStartError, match=r"^your part has been computing for 60 s.*ex05_scheduler.py"):
        serving.record(exercises.find(5), tmp_path / PART, tmp_path / "trace")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (["AttributeError: 'NoneType' object has no attribute 'x'"], "AttributeError.*a `return` missing"),
        (["m.OwnError: a", "(APIServer pid=1) INFO Stopped: b"], "died: m.OwnError: a"),
        (
            ["(APIServer) The engine process ended unexpectedly (exit code 7). The server stops."],
            "with exit code 7; does",
        ),
        (["nothing of it"], "^the engine has died.$"),
    ],
)
def test_an_engine_that_dies_elsewhere_than_in_the_part_says_why(log: list[str], said: str, tmp_path: Path) -> None:
    line = serving.in_short(["the engine has died."], log, tmp_path / PART)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(line)
    assert "\n" not in line


REQUEST = "[[serve.load]]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("after = 5", "after = 5 must be text"),
        ("leaves = 'nine'", "leaves = 'nine' must be an int"),
        ("stopped = true", "stopped = True must be an int"),
        ("step = []", "must be an int, and at least 1"),
        ("step = 0", "must be an int, and at least 1"),
        ("call = -1", "at least 0"),
        ("name = 5", "name = 5 must be text"),
        ("name = 'a b/ü'", "must consist of letters"),
        ("name = ''", "must consist of letters"),
        ("path = 'v1'\n[[serve.load]]", "must begin with /"),
        ("path = '/v1'", "one of them a completion"),
        ("name = 'a'\n[[serve.load]]\nname = 'a'", "two requests have the name 'a'"),
        ("name = 'r1'\n[[serve.load]]", "two requests have the name 'r1'"),
    ],
)
def test_a_row_of_a_load_that_cannot_be_is_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(f"{REQUEST}{text}", said, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("together = 0", "together = 0 must be an int, and at least 1"),
        ("compare = 'nothing'", "must be 'decisions' or 'answers'"),
        ("exercises = { nonsense = 1 }", "counts nonsense"),
        ("exercises = { steps = '1' }", "steps = '1' must be an int"),
        ("exercises = 5", "must be a table"),
        ("flags = [5]", "one of flags = 5 must be text"),
        ("flags = '--seed 0'", "must be a list"),
        ("environment = { A = 1 }", "A = 1 must be text"),
        ("after = 5", "after = 5 must be text"),
        ("colour = 5", "no 'colour'"),
        ("load = 5", "must be a list"),
        ("load = [5]", "must be tables"),
        ("load = []", "must be tables"),
    ],
)
def test_a_serve_table_that_cannot_be_is_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(f"[serve]\n{text}\n" + ("" if text.startswith("load") else REQUEST), said, tmp_path, monkeypatch)


def refused(text: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercises, "ROOT", folder)
    file = folder / "ex01_x" / "exercise.toml"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="^ex01_x/exercise.toml: ") as error:
        exercises._read(file)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1
