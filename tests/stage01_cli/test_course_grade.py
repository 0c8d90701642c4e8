"""`stages course grade`: a class's submissions, some of them hostile. Each that misbehaves fails alone."""

from __future__ import annotations

import csv
import os
import socket
from pathlib import Path

import pytest

from stage01_cli.main import main
from stage01_cli.tools.course import grading, sandbox
from stage01_cli.tools.course.exercises import find

pytestmark = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
SCHEDULER = find("scheduler")
BEGINNING = (
    "import os, socket, threading\nfrom stage03_engine.core.scheduler import Scheduler as R\n\n\nclass Scheduler(R):\n"
)
ATTEMPTS = """
    def schedule(self):
        attempts = {{
            "fork": os.fork,
            "network": lambda: socket.create_connection(("127.0.0.1", {port})),
            "local socket": lambda: socket.socket(socket.AF_UNIX),
            "signal": lambda: os.kill(os.getppid(), 0),
            "write": lambda: open({outside!r}, "w"),
            "truncate": lambda: os.truncate({outside!r}, 0),
            "remove": lambda: os.remove({outside!r}),
            "rename": lambda: os.rename({outside!r}, {outside!r} + "2"),
            "permissions": lambda: os.chmod({outside!r}, 0),
            "folder": lambda: os.mkdir({outside!r} + "3"),
        }}
        succeeded = []
        for name, attempt in attempts.items():
            try:
                attempt()
                succeeded.append(name)
            except OSError:
                pass
        threading.Thread(target=print).start()
        open("own.txt", "w").write("a place of its own")
        raise RuntimeError(f"succeeded: {{succeeded}}")
"""
SUBMISSIONS = {
    "good": "    pass\n",
    "loops": "    def schedule(self):\n        while True:\n            pass\n",
    "eats": "    def schedule(self):\n        self.all = [bytearray(100 << 20) for _ in range(1000)]\n",
    "prints": "    def schedule(self):\n        while True:\n            print('x' * 1000000)\n",
    "forges": "    def schedule(self):\n        open('verdicts.jsonl', 'w').write('[1')\n        os._exit(0)\n",
}


def submit(folder: Path, student: str, body: str) -> Path:
    path = folder / student / f"{SCHEDULER.name}.py"
    path.parent.mkdir()
    path.write_text(BEGINNING + body, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def grades(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The table of a class, by student."""
    folder = tmp_path_factory.mktemp("class")
    outside = folder / "outside.txt"
    outside.write_text("untouched")
    for student, body in SUBMISSIONS.items():
        submit(folder, student, body)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        submit(folder, "tries", ATTEMPTS.format(port=listener.getsockname()[1], outside=str(outside)))
        (folder / "links").mkdir()
        (folder / "links" / f"{SCHEDULER.name}.py").symlink_to("/etc/passwd")
        table = folder / "table.csv"
        before, grading.LIMIT = grading.LIMIT, {False: 20, True: 20}
        try:
            assert main(["course", "grade", str(folder), "--csv", str(table)]) == 0
        finally:
            grading.LIMIT = before
    assert outside.read_text() == "untouched" and os.access(outside, os.R_OK)
    assert sorted(each.name for each in folder.iterdir() if each.is_file()) == ["outside.txt", "table.csv"]
    with table.open(newline="") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def test_every_submission_has_its_own_line(grades: dict[str, dict[str, str]]) -> None:
    assert list(grades) == sorted([*SUBMISSIONS, "tries", "links"])
    assert {name: row["outcome"] == "passed" for name, row in grades.items()} == {
        name: name == "good" for name in grades
    }
    assert grades["good"]["points"] == str(SCHEDULER.points) and grades["tries"]["points"] == "0"
    assert grades["tries"]["imports"] == "os, socket, threading"


@pytest.mark.parametrize(
    ("student", "said"),
    [
        ("loops", "no verdict within 20 s"),
        ("eats", "MemoryError"),
        ("prints", "File too large"),
        ("forges", "no verdict that can be read"),
        ("links", "not a regular file"),
        ("tries", "RuntimeError: succeeded: []"),
    ],
)
def test_what_misbehaves_fails_alone(grades: dict[str, dict[str, str]], student: str, said: str) -> None:
    assert said in grades[student]["verdict"], grades[student]["verdict"]


def test_a_folder_without_submissions_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert main(["course", "grade", str(folder)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    row = grading.Grade("=cmd()", "ex05_scheduler", 0, "error", "+1\nsecond line", 0.0, "")
    with (tmp_path / "t.csv").open("w", newline="") as file:
        grading.write_csv([row], file)
    text = (tmp_path / "t.csv").read_text()
    assert "'=cmd()" in text and "'+1 second line" in text
