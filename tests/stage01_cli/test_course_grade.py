"""`stages course grade`: a class's submissions, some of them hostile. Each that misbehaves fails alone."""

from __future__ import annotations

import ast
import csv
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest

from stage01_cli.main import main
from stage01_cli.tools.course import grading, sandbox
from stage01_cli.tools.course.exercises import JUDGES, Exercise, exercises, find, parsed
from stage01_cli.tools.course.gradescope import write_results
from stage01_cli.tools.course.sealed import LARGEST, Reading, opened, seal
from stage01_cli.tools.course.sentences import kept, sentences_of
from stage01_cli.tools.course.similarity import FEWEST, alike, fingerprints
from stage01_cli.tools.course.verdict import Verdict, read
from stage03_engine.errors import ConfigError

pytestmark = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
sys.path.append(str(JUDGES))
from pasted import pasted  # noqa: E402

SCHEDULER, POOL = find("scheduler"), find("block_pool")
WRITTEN = pasted(SCHEDULER).replace("class Scheduler(", "class Base(") + "\n\nclass Scheduler(Base):\n"
"""An honest scheduler, and the beginning of a class that may change it."""
ATTEMPTS = """
    def schedule(self):
        import os, socket, threading
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
    "loops": "    def schedule(self):\n        while True:\n            pass\n",
    "eats": "    def schedule(self):\n        self.all = [bytearray(100 << 20) for _ in range(1000)]\n",
    "prints": "    def schedule(self):\n        while True:\n            print('x' * 1000000)\n",
    "forges": "    def schedule(self):\n        import os\n        for n in range(3, 64):\n            try:\n                os.write(n, b'[1')\n            except OSError:\n                pass\n        os._exit(0)\n",
    "digs": """    def schedule(self):
        import os
        while True:
            os.mkdir("deep")
            os.chdir("deep")
""",
    "threads": """    def schedule(self):
        import threading
        threading.stack_size(32768)
        while True:
            threading.Thread(target=threading.Event().wait).start()
""",
    "shares": """    def schedule(self):
        import mmap, threading
        self.all = [mmap.mmap(-1, 1 << 30) for _ in range(2)]
        for each in self.all:
            for _ in range(1000):
                each.write(bytes(1 << 20))
        threading.Event().wait()
""",
}


def submit(folder: Path, student: str, body: str) -> Path:
    path = folder / student / f"{SCHEDULER.name}.py"
    path.parent.mkdir()
    path.write_text(WRITTEN + body, encoding="utf-8")
    return path


FEW = frozenset({"good", "tries", "links"})  # one is judged to its end, one tries to get out, and one need not run
EVERYBODY = FEW | SUBMISSIONS.keys()


@pytest.fixture(scope="module")
def grades(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The table of a class, by student: of `request.param`."""
    folder, temporary = tmp_path_factory.mktemp("class"), tmp_path_factory.mktemp("scratch")
    outside = folder / "outside.txt"
    outside.write_text("untouched")
    (folder / "good").mkdir()
    POOL.solution(folder / "good").write_text(pasted(POOL), encoding="utf-8")
    for student in SUBMISSIONS.keys() & request.param:
        submit(folder, student, SUBMISSIONS[student])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        submit(folder, "tries", ATTEMPTS.format(port=listener.getsockname()[1], outside=str(outside)))
        (folder / "links").mkdir()
        (folder / "links" / f"{SCHEDULER.name}.py").symlink_to("/etc/passwd")
        table = folder / "table.csv"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grading, "LIMIT", {False: 20, True: 20})
            patch.setattr(grading.tempfile, "tempdir", str(temporary))
            patch.setattr(grading, "refusals", lambda exercise, path: [])  # the sandbox is what is tested
            assert main(["course", "grade", str(folder), "--csv", str(table)]) == 0
    assert outside.read_text() == "untouched" and os.access(outside, os.R_OK)
    assert not list(temporary.iterdir())
    assert sorted(each.name for each in folder.iterdir() if each.is_file()) == ["outside.txt", "table.csv"]
    with table.open(newline="") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


CLASSES = [pytest.param(FEW, id="few"), pytest.param(EVERYBODY, id="everybody", marks=pytest.mark.slow)]


@pytest.mark.parametrize("grades", CLASSES, indirect=True)
def test_every_submission_has_its_own_line(grades: dict[str, dict[str, str]]) -> None:
    assert list(grades) in (sorted(FEW), sorted(EVERYBODY))
    assert {name: row["outcome"] == "passed" for name, row in grades.items()} == {
        name: name == "good" for name in grades
    }
    assert grades["good"]["points"] == str(POOL.points) and grades["tries"]["points"] == "0"
    assert grades["tries"]["imports"] == "os, socket, stagetrace, threading"


SAID = {
    "links": "not a regular file",
    "tries": "RuntimeError: succeeded: []",
    "loops": "no verdict within 20 s",
    "eats": "MemoryError",
    "prints": "File too large",
    "forges": "no verdict that can be read",
    "digs": "it wrote",
    "threads": "more than 256 threads",
    "shares": "MiB of memory",
}


@pytest.mark.parametrize("grades", CLASSES, indirect=True)
def test_what_misbehaves_fails_alone(grades: dict[str, dict[str, str]]) -> None:
    bad = grades.keys() - {"good"}
    assert not {student: grades[student] for student in bad if SAID[student] not in grades[student]["verdict"]}


def test_what_no_limit_of_the_kernel_bounds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grading._too_much(os.getpid(), 1 << 50) is None
    assert grading._too_much(os.getpid(), 1 << 20) == "it used more than 1 MiB of memory"
    monkeypatch.setattr(grading, "MOST_THREADS", 0)
    assert grading._too_much(os.getpid(), 1 << 50) == "it started more than 0 threads"


def test_what_takes_too_long_or_too_much_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, most, said in ((0, 256, "no verdict within 0 s"), (60, 0, "it started more than 0 threads")):
        monkeypatch.setattr(grading, "MOST_THREADS", most)
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        assert grading._wait(process, tmp_path, seconds, 1 << 50) == said
        assert process.returncode == -signal.SIGKILL


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


KEY = b"k" * 32
LINES = ['{"collected": 1}', '{"outcome": "passed", "text": ""}']
SEALED = [f"{seal(KEY, number, line)} {line}" for number, line in enumerate(LINES)]


@pytest.mark.parametrize(
    "written",
    ["[" * 100_000, "\n".join(LINES), SEALED[1], "\n".join([SEALED[0]] * 2), SEALED[0] + " ", f"{seal(b'', 0, LINES[0])} {LINES[0]}"],
    ids=["nested", "no seal", "another's turn", "twice", "changed", "another key"],
)  # fmt: skip
def test_a_forged_verdict_is_refused(written: str) -> None:
    assert opened(KEY, "\n".join(SEALED))[1]["outcome"] == "passed"
    with pytest.raises(ValueError, match="has not written"):
        opened(KEY, written)


def test_a_verdict_without_end_is_refused() -> None:
    reading = Reading()
    os.write(reading.descriptors[0], b"x" * (1 << 16))
    for _ in range(2 * LARGEST >> 16):
        os.write(reading.descriptors[0], b"x" * (1 << 16))
    with pytest.raises(ValueError, match="more than"):
        reading.lines()


def test_a_verdict_can_be_written_anywhere(tmp_path: Path) -> None:
    """Half a character comes of honest detokenizers, too."""
    lines = [{"collected": 1}, {"outcome": "error", "text": "a\ud800\u001b[2J\nb"}]
    verdict = read(lines, tmp_path / "stack.txt", tmp_path / "solution.py", 1)
    assert verdict is not None and verdict.text == "a\\ud800\\x1b[2J\nb"


def test_a_scratch_folder_is_measured_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(20):
        (folder / str(number)).touch()
    assert grading._too_large(folder) is None
    here = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(3000):  # Python's own way of removing it ends at a thousand
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    (folder / "closed").chmod(0)
    assert "cannot be looked at" in str(grading._too_large(folder))
    grading._remove(folder)
    assert not folder.exists()


def test_many_small_files_are_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "LARGEST_FOLDER", 20 * 4096)
    for number in range(21):
        (tmp_path / str(number)).touch()
    assert "wrote more" in str(grading._too_large(tmp_path))


def test_who_submitted_nothing_has_a_row(tmp_path: Path) -> None:
    (tmp_path / "nobody").mkdir()
    submit(tmp_path, "somebody", "    pass\n")
    assert [(name, exercise and exercise.number) for name, exercise, _ in grading.submissions(tmp_path)] == [
        ("nobody", None),
        ("somebody", 5),
    ]
    row = grading.grade_one("nobody", None, tmp_path / "nobody")
    assert (row.points, row.outcome) == (0, "missing") and "no file" in row.verdict


@pytest.mark.parametrize(
    ("hours", "late", "points"), [(-1, "", 15), (0.5, "0 d 1 h", 13.5), (25, "1 d 1 h", 12), (24 * 30, "30 d 0 h", 0)]
)
def test_what_comes_late_loses_a_share_for_each_day(
    hours: float, late: str, points: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = submit(tmp_path, "one", "    pass\n")
    due = grading.due("2026-11-30T12:00+00:00", 10)
    assert due is not None
    written = due.when.timestamp() + 3600 * hours
    os.utime(path, (written, written))
    monkeypatch.setattr(grading, "judge_shut_in", lambda *given: Verdict("passed", ""))
    grade = grading.grade_one("one", SCHEDULER, path, due)
    assert (grade.late, grade.points) == (late, points)


def test_partial_points_are_for_sentences_that_every_test_has_seen_kept() -> None:
    stream = find("stream")
    named = sentences_of(stream)
    assert {*chain(*named.values())} == {*stream.contract}, "a sentence that no test names"
    results = [{"test": name, "outcome": "passed"} for name in named]
    assert kept(stream, results) == [*stream.contract]
    results[0] |= {"outcome": "rejected"}
    assert set(stream.contract) - {*kept(stream, results)} == named[results[0]["test"]]
    assert not kept(stream, [])


def test_what_is_half_right_has_a_share_of_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = find("stream")
    results = [{"test": name, "outcome": "passed"} for name in sentences_of(stream)]
    results[0] |= {"outcome": "rejected"}
    share = len(kept(stream, results)) / len(stream.contract)
    verdict = grading.counted(stream, Verdict("rejected", "why"), results)
    assert (verdict.kept, 0 < share < 1) == (share, True) and verdict.text.endswith(" sentences; why")
    assert grading.counted(stream, Verdict("passed", ""), results[1:]).text == ""
    monkeypatch.setattr(grading, "judge_shut_in", lambda *given: verdict)
    stream.solution(tmp_path).write_text(pasted(stream), encoding="utf-8")
    assert grading.grade_one("one", stream, stream.solution(tmp_path)).points == round(stream.points * share, 2)


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_what_is_half_right_has_half_of_the_points_if_asked_for(partial: bool, tmp_path: Path) -> None:
    stream = find("stream")
    path = stream.solution(tmp_path)
    path.write_text(pasted(stream).replace("return b'data: '", "return b'event: '"), encoding="utf-8")
    grade = grading.grade_one("one", stream, path, partial=partial)
    assert grade.outcome == "rejected" and (grade.points > 0) == partial, grade
    if partial:
        assert grade.points == round(10 * (len(stream.contract) - 1) / len(stream.contract), 2)


def test_a_copy_is_seen_under_other_names(tmp_path: Path) -> None:
    """The one who wrote it, the one who renamed it, one who pasted the reference, and one who wrote something else."""
    stream = find("stream")
    honest = (JUDGES.parents[1] / "stage01_cli/tools/course/similarity.py").read_text(encoding="utf-8")
    texts = {
        "ann": honest,
        "bob": "# mine\n" + honest.replace("kinds", "words").replace("found", "result").replace("hashes", "numbers"),
        "cy": pasted(stream),
        "dan": (JUDGES / "borrowed.py").read_text(encoding="utf-8"),
        "eve": "def (",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        stream.solution(tmp_path / name).write_text(text, encoding="utf-8")
    found = {path.parent.name: text for path, text in grading.similar(list(grading.submissions(tmp_path))).items()}
    assert found["ann"] == "100 % like bob" and found["bob"] == "100 % like ann"
    share, _, whom = found["cy"].partition(" % like ")
    assert whom == "the reference" and int(share) > 80
    assert int(found["dan"].partition(" ")[0]) < 30 and "eve" not in found


@pytest.mark.parametrize("exercise", exercises().values(), ids=lambda each: each.name)
def test_the_references_text_is_recognised(exercise: Exercise, tmp_path: Path) -> None:
    path = exercise.solution(tmp_path)
    path.write_text(pasted(exercise), encoding="utf-8")
    text = alike(exercise, {"one": path}).get("one")
    if text is None:  # so short that two who thought the same wrote the same
        own, given = (fingerprints([parsed(each.read_bytes())]) for each in (path, exercise.starter))
        assert len(own - given) < FEWEST
        return
    assert int(text.partition(" ")[0]) >= 70, text


def test_gradescope_reads_a_test_for_each_exercise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, results = tmp_path / "submission", tmp_path / "results.json"
    folder.mkdir()
    SCHEDULER.solution(folder).write_text(WRITTEN + "    pass\n", encoding="utf-8")
    find("stream").solution(folder).write_text("", encoding="utf-8")
    monkeypatch.setattr(grading, "judge_shut_in", lambda *given: Verdict("passed", ""))
    assert main(["course", "grade", str(folder), "--results", str(results), "--due", "2020-01-01T00:00"]) == 0
    stream, scheduler = json.loads(results.read_text())["tests"]
    assert (stream["score"], stream["max_score"], stream["status"]) == (0, 10, "failed")
    assert "Write server_sent_event yourself" in stream["output"]
    assert (scheduler["score"], scheduler["status"], scheduler["name"]) == (15, "passed", "5. The scheduler")
    assert "late by" in scheduler["output"]


def test_gradescope_asks_for_one_student(tmp_path: Path) -> None:
    rows = [grading.Grade(name, "", 0, "missing", "", 0.0, "") for name in ("one", "two")]
    with pytest.raises(ConfigError, match="--csv has them all"):
        write_results(rows, tmp_path / "results.json")


@pytest.mark.parametrize("words", [["--due", "tomorrow"], ["--late", "10"], ["--due", "2026-11-30", "--late", "101"]])
def test_a_time_that_is_none_is_one_line(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["course", "grade", str(tmp_path), *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_negative_number_of_jobs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--jobs"):
        list(grading.grade(tmp_path, -1))


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from stage01_cli.tools.course import grading
def started(*arguments, **options):
    process = popen(*arguments, **options)
    if "start_new_session" in options:  # not what cleans up
        print(process.pid, flush=True)
        os.kill(os.getpid(), int(sys.argv[2]))
    return process
popen, grading.subprocess.Popen = grading.subprocess.Popen, started
for each in grading.grade(Path(sys.argv[1]), 1):
    print(each)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_the_grader_ends_what_it_judges(tmp_path: Path, number: signal.Signals) -> None:
    """A submission has a session of its own, so Ctrl-C in the terminal does not reach it."""
    for student in ("one", "two"):
        submit(tmp_path, student, SUBMISSIONS["loops"])
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(int(number))],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    [pid] = map(int, run.stdout.split())
    assert run.returncode != 0
    with suppress(ProcessLookupError):  # it has ended, and somebody has seen that
        handle = os.pidfd_open(pid)
        assert select.select([handle], [], [], 20)[0], "it is still there"
        os.close(handle)


def test_a_file_is_parsed_although_a_finalizer_parses_meanwhile() -> None:
    """As Python 3.11 does for every traceback with marks under its lines."""

    class Finalized:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            ast.parse("1 + 1")

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        Finalized()
        assert parsed(Path(__file__).read_bytes()).body
    finally:
        gc.set_threshold(*before)
