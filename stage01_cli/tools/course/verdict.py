"""`check`: run the judge of an exercise on the reader's file, in a process of its own, and say what it found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stage01_cli.tools.course.exercises import ROOT, Exercise, in_project, next_line
from stage01_cli.tools.course.own import num_written, problem
from stage01_cli.tools.course.reading import refusals
from stage01_cli.tools.course.sealed import Reading
from stage01_cli.tools.course.speed import taken
from stage03_engine.errors import ConfigError

LIMIT = {False: 60, True: 180}  # seconds; a check takes 5, or 20 with tensors, on a machine with nothing else to do
SHOWN_EVERY = 0.2  # seconds, in a terminal: how many tests have ended
NEEDED = ("pytest", "hypothesis", "pytest_benchmark", "pytest_timeout", "httpx")

OUTCOMES = ("passed", "rejected", "unwritten", "error", "refused")


@dataclass
class Verdict:
    """What the judge said: passed, or the text of the first thing that is wrong."""

    outcome: str  # one of OUTCOMES
    text: str
    num_tests: int = 0  # that ran; all but the last have passed
    num_collected: int = 0
    seconds: float = 0.0
    kept: float = 0.0  # the share of the contract's sentences, if it was asked for
    speed: str = ""  # of what has passed, in words, if it was asked for

    @property
    def passed(self) -> bool:
        """Does the solution keep the whole contract?"""
        return self.outcome == "passed"


def judge_arguments(
    exercise: Exercise,
    solution: Path,
    reading: Reading,
    stack: Path,
    limit: float,
    all_tests: bool = False,
    speed: bool = False,
) -> list[str]:
    """Of pytest: the judge's tests, up to the first that fails unless `all_tests` are asked for. They write what they found to `reading`,
    and to the file `stack` where they are when the time is up."""
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis", "-o", "addopts="]
    return [
        str(exercise.judge), "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *([] if all_tests else ["-x"]), *quiet,
        "--exercise", str(exercise.number), "--impl", str(solution), "--verdicts", *map(str, reading.descriptors),
        "--stack", str(stack), "--limit", str(limit), *["--speed"] * speed,
    ]  # fmt: skip


def judge(exercise: Exercise, solution: Path, limit: float | None = None, speed: bool = False) -> Verdict:
    """Judge a file, and measure its `speed` if it passes. Raises ConfigError when the judge itself cannot run."""
    limit = limit or LIMIT[exercise.tensors]
    if found := problem(exercise, solution):
        return Verdict(*found)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stages-course-") as folder:
        reading, stack = Reading(), Path(folder) / "stack.txt"
        arguments = judge_arguments(exercise, solution.resolve(), reading, stack, limit, speed=speed)
        with (Path(folder) / "said.txt").open("w+b") as output:
            in_time = _run([sys.executable, "-m", "pytest", *arguments], output, limit + 60, reading)
            output.seek(0)
            said = output.read().decode("utf-8", "replace")
        try:
            lines = reading.lines()
        except ValueError as error:
            return Verdict("error", f"no verdict that can be read: {error}")
        if not in_time:
            return Verdict("error", f"no verdict within {limit:.0f} s: a loop that never ends?")
        fast = taken(lines) if speed else ""
        verdict = read(lines, stack, solution.resolve(), limit)
    if verdict is None:
        raise ConfigError(_reason(said))
    verdict.seconds, verdict.speed = time.monotonic() - began, fast if verdict.passed else ""
    return verdict


def started(command: list[str], output: BinaryIO, reading: Reading, **where: Any) -> subprocess.Popen[bytes]:
    """The process of the tests."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        pass_fds=reading.descriptors, **where,
    )  # fmt: skip


def _run(command: list[str], output: BinaryIO, seconds: float, reading: Reading) -> bool:
    """Run to the end, and end what it started with it, also when this is interrupted. False if the time was up."""
    from tqdm import tqdm

    process, until = started(command, output, reading, cwd=ROOT), time.monotonic() + seconds
    try:
        with tqdm(unit="test", leave=False, disable=None) as bar:
            while (left := until - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(left if bar.disable else min(left, SHOWN_EVERY))
                    return True
                if not bar.disable:
                    bar.n, bar.total = reading.num_so_far()
                    bar.refresh()
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(lines: list[dict[str, Any]], stack: Path, solution: Path, limit: float) -> Verdict | None:
    """What the tests wrote, None if they did not begin. The first that is not passed decides. A stack says where they were when the
    time was up."""
    if not lines:
        return None
    first, *results = lines
    for result in results:
        if result["outcome"] != "passed":
            return Verdict(result["outcome"], printable(result["text"]), len(results), first["collected"])
    if stack.is_file() and (text := stack.read_bytes()[: 1 << 16].decode("utf-8", "replace")):
        here = [line.strip() for line in text.splitlines() if str(solution) in line]
        where = f" It was here: {here[0].replace(str(solution), solution.name)}" if here else ""
        return Verdict("error", f"no verdict within {limit:.0f} s: a loop that never ends?{where}", len(results))
    if len(results) < first["collected"]:
        return Verdict("error", "the process ended in the middle of a test", len(results))
    return Verdict("passed", "", len(results))


def printable(text: str) -> str:
    """As any terminal and any file can take it: half characters and control characters become escapes."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _reason(output: str) -> str:
    """Why pytest ran no test."""
    for package in NEEDED:
        if f"No module named '{package}'" in output or f"No module named {package}" in output:
            return f"the judges need {package}, which is not installed; `make venv` installs everything"
    return f"the judge could not run:\n{printable(output[-2000:])}"


def report(exercise: Exercise, solution: Path, verdict: Verdict) -> str:
    """The verdict for the reader."""
    head = f"exercise {exercise.number}, {exercise.title.lower()}"
    if verdict.passed:
        tests = f"{verdict.num_tests} test{'s' * (verdict.num_tests > 1)}, {verdict.seconds:.1f} s"
        note = (
            [f"Whoever grades it would not run it, though: {refused[0]}"]
            if (refused := refusals(exercise, solution))
            else []
        )
        means = f" ({exercise.speed.note})" if exercise.speed and exercise.speed.note else ""
        fast = [f"speed: {verdict.speed}{means}"] if verdict.speed else []
        return "\n".join(
            [
                f"{head}: passed ({tests})",
                *fast,
                *note,
                f"Now let it serve: {next_line('serve', exercise, solution.parent)}",
            ]
        )
    word = {"unwritten": "not yet written", "rejected": "not yet right", "error": "it does not work yet"}[
        verdict.outcome
    ]
    written, names = num_written(exercise, solution) or (0, 0)
    so_far = f"; {written} of {names} parts written" if written < names else ""
    right = f"; {verdict.num_tests - 1} of {verdict.num_collected} tests pass" if verdict.num_tests > 1 else ""
    return f"{head}: {word} ({in_project(solution)}{so_far}{right})\n{verdict.text}"
