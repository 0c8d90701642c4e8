"""`check`: run the judge of an exercise on the reader's file, in a process of its own, and say what it found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from stage01_cli.tools.course.exercises import ROOT, Exercise, in_project
from stage01_cli.tools.course.own import problem
from stage03_engine.errors import ConfigError

LIMIT = {False: 60, True: 180}  # seconds; a check takes 5, or 20 with tensors, on a machine with nothing else to do
NEEDED = ("pytest", "hypothesis", "pytest_benchmark", "pytest_timeout", "httpx")

OUTCOMES = ("passed", "rejected", "unwritten", "error")
LARGEST = 1 << 20  # bytes that the tests may write


@dataclass
class Verdict:
    """What the judge said: passed, or the text of the first thing that is wrong."""

    outcome: str  # one of OUTCOMES
    text: str
    num_tests: int = 0  # that ran; all but the last have passed
    num_collected: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Does the solution keep the whole contract?"""
        return self.outcome == "passed"


def judge_arguments(exercise: Exercise, solution: Path, verdicts: Path, limit: float) -> list[str]:
    """Of pytest: the judge's tests up to the first that fails, which write what they found to `verdicts`."""
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis", "-o", "addopts="]
    return [
        str(exercise.judge), "--rootdir", str(ROOT), "-x", *quiet,
        "--exercise", str(exercise.number), "--impl", str(solution), "--verdicts", str(verdicts), "--limit", str(limit),
    ]  # fmt: skip


def judge(exercise: Exercise, solution: Path, limit: float | None = None) -> Verdict:
    """Judge a file. Raises ConfigError when the judge itself cannot run."""
    limit = limit or LIMIT[exercise.tensors]
    if found := problem(exercise, solution):
        return Verdict(*found)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stages-course-") as folder:
        verdicts = Path(folder) / "verdicts.jsonl"
        command = [sys.executable, "-m", "pytest", *judge_arguments(exercise, solution.resolve(), verdicts, limit)]
        with (Path(folder) / "said.txt").open("w+", encoding="utf-8", errors="replace") as output:
            if not _run(command, output, limit + 60):
                return Verdict("error", f"no verdict within {limit:.0f} s: a loop that never ends?")
            output.seek(0)
            said = output.read()
        verdict = read(verdicts, solution.resolve(), limit)
    if verdict is None:
        raise ConfigError(_reason(said))
    verdict.seconds = time.monotonic() - began
    return verdict


def _run(command: list[str], output: TextIO, seconds: float) -> bool:
    """Run to the end, and end what it started with it, also when this is interrupted. False if the time was up."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(verdicts: Path, solution: Path, limit: float) -> Verdict | None:
    """What the tests wrote, None if they did not begin. The first that is not passed decides. A stack lies beside it when the
    time was up. Raises ValueError, KeyError or TypeError for a file that the tests have not written."""
    if verdicts.exists() and verdicts.stat().st_size > LARGEST:
        raise ValueError(f"more than {LARGEST} bytes")
    lines = verdicts.read_text(encoding="utf-8").splitlines() if verdicts.exists() else []
    if not lines:
        return None
    try:
        first, *results = [json.loads(line) for line in lines]
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    for result in results:
        if result["outcome"] not in OUTCOMES:
            raise ValueError(f"no such outcome: {result['outcome']!r}")
        if result["outcome"] != "passed":
            return Verdict(result["outcome"], printable(result["text"]), len(results), first["collected"])
    stack = verdicts.with_suffix(".stack")
    if stack.exists() and (text := stack.read_text(encoding="utf-8")):
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
        return f"{head}: passed ({tests})\nNow let it serve: stages course serve {exercise.number}"
    word = {"unwritten": "not yet written", "rejected": "not yet right", "error": "it does not work yet"}[
        verdict.outcome
    ]
    right = f"; {verdict.num_tests - 1} of {verdict.num_collected} tests pass" if verdict.num_tests > 1 else ""
    return f"{head}: {word} ({in_project(solution)}{right})\n{verdict.text}"
