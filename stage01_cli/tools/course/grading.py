"""`grade`: judge a folder of submissions, DIR/STUDENT/exNN_name.py, each in a sandbox of its own, so that one that loops, eats
memory, forks or prints without end fails alone.

A submission runs in the same process as its judge. The sandbox protects the machine and the other submissions; what keeps a hostile one
from its judge is that it is read before it runs (reading.py), watched while it runs (guard.py), and that its verdict is sealed
(sealed.py). `imports` lists what a file imports beyond its starter: look there first.
"""

from __future__ import annotations

import ast
import csv
import math
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
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from stage01_cli.tools.course import sandbox
from stage01_cli.tools.course.exercises import ROOT, Exercise, exercises, parsed
from stage01_cli.tools.course.own import problem
from stage01_cli.tools.course.reading import refusals
from stage01_cli.tools.course.sealed import Reading
from stage01_cli.tools.course.sentences import kept
from stage01_cli.tools.course.similarity import alike
from stage01_cli.tools.course.speed import required_of_one, taken
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
    points: float
    outcome: str  # passed, rejected, unwritten, error, refused, missing
    verdict: str
    seconds: float
    imports: str
    late: str = ""  # by how much, of a file that came after the day
    similar: str = ""  # whom it resembles most
    speed: str = ""  # of what passed: the ratio to the plain twin's time, and in how many rounds


@dataclass(frozen=True)
class Due:
    """When submissions are due, and the share of its points that one loses with each day that has begun since."""

    when: datetime
    per_day: float = 0.0

    def of(self, path: Path) -> tuple[str, float]:
        """(how late, in words, the share of the points that is left) by the time at which the file was last written."""
        late = datetime.fromtimestamp(path.lstat().st_mtime, UTC) - self.when
        if late <= timedelta(0):
            return "", 1.0
        hours = math.ceil(late / timedelta(hours=1))
        return f"{hours // 24} d {hours % 24} h", max(0.0, 1.0 - self.per_day * math.ceil(late / timedelta(days=1)))


def due(text: str | None, percent: float) -> Due | None:
    """What `--due` and `--late` say. A time without a zone is this machine's. Raises ConfigError for what is no time, or no percentage."""
    if not 0 <= percent <= 100:
        raise ConfigError(f"--late must be a percentage from 0 to 100, and is {percent:g}")
    if text is None:
        if percent:
            raise ConfigError("--late needs --due, the time from which a submission is late")
        return None
    try:
        return Due(datetime.fromisoformat(text).astimezone(UTC), percent / 100)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"--due must be a time such as 2026-11-30T23:59, and is {text!r}") from error


def submissions(folder: Path) -> Iterator[tuple[str, Exercise | None, Path]]:
    """(student, exercise, file), sorted, of a folder of students or of one student's; (student, None, folder) for one who has submitted nothing. Raises ConfigError if the folder is
    missing, or nobody has submitted anything."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; it must hold a folder for each student, with files such as ex05_scheduler.py"
        )
    found: list[tuple[str, Exercise | None, Path]] = []
    alone = any(
        os.path.lexists(folder / f"{each.name}.py") for each in exercises().values()
    )  # the folder of one student
    for student in [folder] if alone else sorted(each for each in folder.iterdir() if each.is_dir()):
        files = [(each, student / f"{each.name}.py") for each in exercises().values()]
        found += [(student.resolve().name, each, path) for each, path in files if os.path.lexists(path)] or [
            (student.name, None, student)
        ]
    if not any(exercise for _, exercise, _ in found):
        raise ConfigError(
            f"no submission in {folder}: it must hold files such as STUDENT/ex05_scheduler.py, or one student's alone"
        )
    yield from found


def grade(
    folder: Path, jobs: int = 0, until: Due | None = None, partial: bool = False, speed: bool = False
) -> Iterator[Grade]:
    """A grade for each submission, in order; `jobs` are judged at a time, 0 for one per core. Raises ConfigError where there is no
    sandbox, or no submission whose `speed` could be measured."""
    if problem := sandbox.problem():
        raise ConfigError(problem)
    if jobs < 0:
        raise ConfigError(f"--jobs must not be negative, and is {jobs}")

    found = list(submissions(folder))
    if speed:
        required_of_one([exercise for _, exercise, _ in found if exercise])
    resembles = similar(found)

    def one(submission: tuple[str, Exercise | None, Path]) -> Grade:
        return replace(grade_one(*submission, until, partial, speed), similar=resembles.get(submission[2], ""))

    _ended.clear()
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as judges:
        try:
            yield from judges.map(one, found)
        except BaseException:  # Ctrl-C, or the reader of the table has left
            _ended.set()
            judges.shutdown(wait=False, cancel_futures=True)
            raise


def similar(found: list[tuple[str, Exercise | None, Path]]) -> dict[Path, str]:
    """File -> what else it resembles most, of the same exercise."""
    by_exercise: dict[int, tuple[Exercise, dict[str, Path]]] = {}
    for student, exercise, path in found:
        if exercise and path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST_SUBMISSION:
            by_exercise.setdefault(exercise.number, (exercise, {}))[1][student] = path
    return {
        files[student]: printable(text)
        for exercise, files in by_exercise.values()
        for student, text in alike(exercise, files).items()
    }


def grade_one(
    student: str,
    exercise: Exercise | None,
    path: Path,
    until: Due | None = None,
    partial: bool = False,
    speed: bool = False,
) -> Grade:
    """Judge one file in a sandbox. What it may do wrong is in the grade, never raised."""
    if exercise is None:
        return Grade(
            printable(student),
            "",
            0,
            "missing",
            "no file with the name of an exercise, such as ex05_scheduler.py",
            0.0,
            "",
        )
    began = time.monotonic()
    if path.is_symlink() or not path.is_file():
        verdict, imports = Verdict("error", "not a regular file"), ""
    elif path.stat().st_size > LARGEST_SUBMISSION:
        verdict, imports = Verdict("error", f"more than {LARGEST_SUBMISSION} bytes"), ""
    else:
        verdict = read_first(exercise, path) or judge_shut_in(
            exercise, path, partial, speed and exercise.speed is not None
        )
        imports = ", ".join(own_imports(exercise, path))
    late, share = until.of(path) if until else ("", 1.0)
    points = round(share * exercise.points * (1.0 if verdict.passed else verdict.kept), 2)
    points = int(points) if points.is_integer() else points  # 15, not 15.0
    seconds = round(time.monotonic() - began, 1)
    return Grade(
        printable(student),
        exercise.name,
        points,
        verdict.outcome,
        verdict.text[:LONGEST_VERDICT],
        seconds,
        imports[:LONGEST_VERDICT],
        late,
        speed=verdict.speed,
    )


def read_first(exercise: Exercise, path: Path) -> Verdict | None:
    """The verdict on a file that need not run, or may not."""
    if found := problem(exercise, path):
        return Verdict(*found)
    if refused := refusals(exercise, path):
        return Verdict("refused", "It was not run: " + " ".join(refused))
    return None


def judge_shut_in(exercise: Exercise, path: Path, partial: bool = False, speed: bool = False) -> Verdict:
    """The verdict on a file that is judged in a sandbox, in a folder of its own that is removed afterwards. With `partial` all tests run, and
    the verdict says how much of the contract is kept. With `speed` a part that passes is measured, too."""
    limit = LIMIT[exercise.tensors]
    scratch = Path(tempfile.mkdtemp(prefix="stages-grade-"))
    try:
        solution, stack, said = scratch / path.name, scratch / "stack.txt", scratch / "said.txt"
        reading = Reading()
        shutil.copyfile(path, solution)
        command = [sys.executable, "-m", sandbox.__name__, str(scratch), str(2 * limit), str(MEMORY[exercise.tensors])]
        command += [str(os.getpid()), *judge_arguments(exercise, solution, reading, stack, limit, partial, speed)]
        with said.open("w+b") as output:
            process = started(command, output, reading, cwd=scratch, env=environment(scratch))
            ended = _wait(process, scratch, 2 * limit, MEMORY[exercise.tensors])
            lines = reading.lines()
            if ended is not None:
                return Verdict("error", ended)
            fast = taken(lines) if speed else ""
            found = read(lines, stack, solution, limit)
            if found is None:
                return Verdict("error", f"the judge could not run: {_end_of(output)}")
            found.speed = fast if found.passed else ""
            return counted(exercise, found, lines[1:]) if partial and len(lines) - 1 == lines[0]["collected"] else found
    except (ValueError, OSError) as error:  # it has written where its verdict goes
        return Verdict("error", f"no verdict that can be read: {error}")
    finally:
        _remove(scratch)


def counted(exercise: Exercise, verdict: Verdict, results: list[dict[str, Any]]) -> Verdict:
    """The verdict, with the sentences of the contract that are kept."""
    if not verdict.passed:
        found = kept(exercise, results)
        verdict.kept = len(found) / len(exercise.contract)
        verdict.text = f"keeps {len(found)} of {len(exercise.contract)} sentences; {verdict.text}"
    return verdict


def environment(scratch: Path) -> dict[str, str]:
    """Nothing of the grader's own but where Python and the project are, and the seed of a class; every cache lies in the scratch folder."""
    passed_on = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "COURSE_SEED") if name in os.environ}
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
        passed_on
        | dict.fromkeys(places, str(scratch))
        | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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
    for node in ast.walk(parsed(path.read_bytes())):
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
