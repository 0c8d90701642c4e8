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
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, TextIO

from stage01_cli.tools.course import sandbox
from stage01_cli.tools.course.exercises import ROOT, Exercise, exercises
from stage01_cli.tools.course.own import problem
from stage01_cli.tools.course.reading import refusals
from stage01_cli.tools.course.sealed import Reading
from stage01_cli.tools.course.verdict import LIMIT, Verdict, judge_arguments, printable, read, started
from stage03_engine.errors import ConfigError

MEMORY = {False: 1 << 30, True: 2 << 30}  # bytes, without and with tensors
LARGEST_SUBMISSION = 1 << 20
LARGEST_FOLDER = 256 << 20  # what a submission may write in all
MOST_THREADS = 256
LONGEST_VERDICT = 2000  # characters
POLL_SECONDS = 0.1
FILE_BYTES = 4096  # what a file takes at least
_ended = threading.Event()
"""Set when the grader is interrupted: whatever is being judged is killed."""


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
    if jobs < 0:
        raise ConfigError(f"--jobs must not be negative, and is {jobs}")
    _ended.clear()
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as judges:
        try:
            yield from judges.map(lambda each: grade_one(*each), list(submissions(folder)))
        except BaseException:  # Ctrl-C, or the reader of the table has left
            _ended.set()
            judges.shutdown(wait=False, cancel_futures=True)
            raise


def grade_one(student: str, exercise: Exercise, path: Path) -> Grade:
    """Judge one file in a sandbox. What it may do wrong is in the grade, never raised."""
    began = time.monotonic()
    if path.is_symlink() or not path.is_file():
        verdict, imports = Verdict("error", "not a regular file"), ""
    elif path.stat().st_size > LARGEST_SUBMISSION:
        verdict, imports = Verdict("error", f"more than {LARGEST_SUBMISSION} bytes"), ""
    else:
        verdict = read_first(exercise, path) or judge_shut_in(exercise, path)
        imports = ", ".join(own_imports(exercise, path))
    points = exercise.points if verdict.passed else 0
    seconds = round(time.monotonic() - began, 1)
    return Grade(
        printable(student),
        exercise.name,
        points,
        verdict.outcome,
        verdict.text[:LONGEST_VERDICT],
        seconds,
        imports[:LONGEST_VERDICT],
    )


def read_first(exercise: Exercise, path: Path) -> Verdict | None:
    """The verdict on a file that need not run, or may not."""
    if found := problem(exercise, path):
        return Verdict(*found)
    if refused := refusals(exercise, path):
        return Verdict("refused", "It was not run: " + " ".join(refused))
    return None


def judge_shut_in(exercise: Exercise, path: Path) -> Verdict:
    """The verdict on a file that is judged in a sandbox, in a folder of its own that is removed afterwards."""
    limit = LIMIT[exercise.tensors]
    scratch = Path(tempfile.mkdtemp(prefix="stages-grade-"))
    try:
        solution, stack, said = scratch / path.name, scratch / "stack.txt", scratch / "said.txt"
        reading = Reading()
        shutil.copyfile(path, solution)
        command = [sys.executable, "-m", sandbox.__name__, str(scratch), str(2 * limit), str(MEMORY[exercise.tensors])]
        command += [str(os.getpid()), *judge_arguments(exercise, solution, reading, stack, limit)]
        with said.open("w+b") as output:
            process = started(command, output, reading, cwd=scratch, env=environment(scratch))
            ended = _wait(process, scratch, 2 * limit, MEMORY[exercise.tensors])
            lines = reading.lines()
            if ended is not None:
                return Verdict("error", ended)
            found = read(lines, stack, solution, limit)
            return found or Verdict("error", f"the judge could not run: {_end_of(output)}")
    except (ValueError, OSError) as error:  # it has written where its verdict goes
        return Verdict("error", f"no verdict that can be read: {error}")
    finally:
        _remove(scratch)


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


def _wait(process: subprocess.Popen[bytes], scratch: Path, seconds: float, memory: int) -> str | None:
    """Wait for the end; kill what takes too long or too much, and say so."""
    deadline = time.monotonic() + seconds
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"no verdict within {seconds:.0f} s"
            if _ended.is_set():
                return "the grader was interrupted"
            if too_much := _too_much(process.pid, memory) or _too_large(scratch):
                return too_much
            time.sleep(POLL_SECONDS)
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _too_much(pid: int, memory: int) -> str | None:
    """What no limit of the kernel bounds: the number of threads, and memory that is shared."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it has ended
        return None
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if int(status.get("Threads", ["1"])[0]) > MOST_THREADS:
        return f"it started more than {MOST_THREADS} threads"
    if sum(int(status.get(name, ["0"])[0]) << 10 for name in ("RssAnon", "RssShmem")) > memory:
        return f"it used more than {memory >> 20} MiB of memory"
    return None


def _too_large(folder: Path) -> str | None:
    """A file counts with a block at least. Paths have an end, so what is nested too deeply to be looked at is too much."""
    total, folders = 0, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    total += max(FILE_BYTES, entry.stat(follow_symlinks=False).st_size)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if total > LARGEST_FOLDER:
                        return f"it wrote more than {LARGEST_FOLDER >> 20} MiB"
        except (FileNotFoundError, NotADirectoryError):  # it has been removed
            continue
        except OSError as error:
            return f"it wrote folders that cannot be looked at: {error.strerror}"
    return None


def _remove(folder: Path) -> None:
    """With everything in it: shutil.rmtree gives up in folders that are nested a thousand times, or may not be read."""
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def _end_of(file: BinaryIO) -> str:
    file.seek(max(0, os.fstat(file.fileno()).st_size - 500))
    return printable(file.read(500).decode("utf-8", "replace").strip())


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
