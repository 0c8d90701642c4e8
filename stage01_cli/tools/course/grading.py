"""`grade`: judge a folder of submissions, DIR/STUDENT/exNN_name.py, each in a sandbox of its own, so that one that loops, eats
memory, forks or prints without end fails alone.

A submission runs in the same process as its judge. The sandbox protects the machine and the other submissions; it cannot keep a
hostile one from writing its own verdict. `imports` lists what a file imports beyond its starter: look there first.
"""

from __future__ import annotations

import ast
import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

from stage01_cli.tools.course import sandbox
from stage01_cli.tools.course.exercises import ROOT, Exercise, exercises
from stage01_cli.tools.course.verdict import LIMIT, Verdict, judge_arguments, read
from stage03_engine.errors import ConfigError

MEMORY = {False: 1 << 30, True: 2 << 30}  # bytes, without and with tensors
LARGEST_SUBMISSION = 1 << 20
LARGEST_FOLDER = 256 << 20  # what a submission may write in all
LONGEST_VERDICT = 2000  # characters
POLL_SECONDS = 0.1


@dataclass
class Grade:
    """One line of the table."""

    student: str
    exercise: str
    points: int
    outcome: str  # passed, rejected, unwritten, error
    verdict: str
    seconds: float
    imports: str


def submissions(folder: Path) -> Iterator[tuple[str, Exercise, Path]]:
    """(student, exercise, file), sorted. Raises ConfigError if the folder is missing, or holds none."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; it must hold a folder for each student, with files such as ex05_scheduler.py"
        )
    found = [
        (student.name, exercise, student / f"{exercise.name}.py")
        for student in sorted(folder.iterdir())
        if student.is_dir()
        for exercise in exercises().values()
        if os.path.lexists(student / f"{exercise.name}.py")
    ]
    if not found:
        raise ConfigError(f"no submission in {folder}: it must hold files such as STUDENT/ex05_scheduler.py")
    yield from found


def grade(folder: Path, jobs: int = 0) -> Iterator[Grade]:
    """A grade for each submission, in order; `jobs` are judged at a time, 0 for one per core. Raises ConfigError where there is no
    sandbox."""
    if problem := sandbox.problem():
        raise ConfigError(problem)
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as judges:
        yield from judges.map(lambda each: grade_one(*each), list(submissions(folder)))


def grade_one(student: str, exercise: Exercise, path: Path) -> Grade:
    """Judge one file in a sandbox. What it may do wrong is in the grade, never raised."""
    began = time.monotonic()
    if path.is_symlink() or not path.is_file():
        verdict, imports = Verdict("error", "not a regular file"), ""
    elif path.stat().st_size > LARGEST_SUBMISSION:
        verdict, imports = Verdict("error", f"more than {LARGEST_SUBMISSION} bytes"), ""
    else:
        verdict, imports = judge_shut_in(exercise, path), ", ".join(own_imports(exercise, path))
    points = exercise.points if verdict.passed else 0
    seconds = round(time.monotonic() - began, 1)
    return Grade(student, exercise.name, points, verdict.outcome, verdict.text[:LONGEST_VERDICT], seconds, imports)


def judge_shut_in(exercise: Exercise, path: Path) -> Verdict:
    """The verdict on a file that is judged in a sandbox, in a folder of its own that is removed afterwards."""
    limit = LIMIT[exercise.tensors]
    scratch = Path(tempfile.mkdtemp(prefix="stages-grade-"))
    try:
        solution, verdicts, said = scratch / path.name, scratch / "verdicts.jsonl", scratch / "said.txt"
        shutil.copyfile(path, solution)
        command = [sys.executable, "-m", sandbox.__name__, str(scratch), str(2 * limit), str(MEMORY[exercise.tensors])]
        command += judge_arguments(exercise, solution, verdicts, limit)
        with said.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=scratch, env=environment(scratch), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            ended = _wait(process, scratch, 2 * limit)
        if ended is not None:
            return Verdict("error", ended)
        found = read(verdicts, solution, limit)
        return found or Verdict("error", f"the judge could not run: {_end_of(said)}")
    except (ValueError, KeyError, TypeError, OSError) as error:  # it has written into its verdict's file
        return Verdict("error", f"no verdict that can be read: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def environment(scratch: Path) -> dict[str, str]:
    """Nothing of the grader's own but where Python and the project are; every cache lies in the scratch folder."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    places = (
        "HOME",
        "TMPDIR",
        "HYPOTHESIS_STORAGE_DIRECTORY",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "XDG_CACHE_HOME",
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "trace")])
    return (
        kept | dict.fromkeys(places, str(scratch)) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    )


def _wait(process: subprocess.Popen[bytes], scratch: Path, seconds: float) -> str | None:
    """Wait for the end; kill what takes too long or writes too much, and say so."""
    deadline = time.monotonic() + seconds
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"no verdict within {seconds:.0f} s"
            if _size(scratch) > LARGEST_FOLDER:
                return f"it wrote more than {LARGEST_FOLDER >> 20} MiB"
            time.sleep(POLL_SECONDS)
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # it is being removed
                continue
    return total


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode("utf-8", "replace").strip()


def own_imports(exercise: Exercise, path: Path) -> list[str]:
    """The modules that a file imports and its starter does not; `?` if it cannot be read."""
    try:
        return sorted(set(_imports(path)) - set(_imports(exercise.starter)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ["?"]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


def write_csv(grades: Iterable[Grade], file: TextIO) -> None:
    """A header, then a line per submission as it is judged. A verdict is one line; a cell that a spreadsheet would take for a
    formula begins with an apostrophe."""
    table = csv.DictWriter(file, [field.name for field in fields(Grade)])
    table.writeheader()
    for each in grades:
        row = {name: " ".join(str(value).split()) for name, value in asdict(each).items()}
        table.writerow({name: f"'{text}" if text[:1] in tuple("=+-@") else text for name, text in row.items()})
        file.flush()
