"""`pytest tests/exercises --exercise 5 --impl work/ex05_scheduler.py` judges a solution. Without --impl the project's own parts are judged."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from judging import Rejected, load, named, reference, wrong_signatures

from stage01_cli.tools.course.exercises import Exercise, exercises, find
from stage01_cli.tools.course.guard import NotYourOwn, Untouched, watching
from stage01_cli.tools.course.own import elsewhere, problem
from stage01_cli.tools.course.sealed import writer
from stage01_cli.tools.course.speed import LIMIT, OWN, REFERENCE, TWIN, Different, measured


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exercise", help="judge this exercise alone: 5, ex05 or scheduler")
    parser.addoption("--impl", type=Path, help="the file to judge; without it the project's own part is judged")
    parser.addoption(
        "--verdicts",
        type=int,
        nargs=2,
        help="write a sealed line for each test to the first descriptor; the second has the key",
    )
    parser.addoption("--limit", type=float, help="seconds; then the process ends")
    parser.addoption("--speed", action="store_true", help="measure what has passed, and write a line for that, too")
    parser.addoption("--stack", type=Path, help="the file that then says where it was")


def pytest_configure(config: pytest.Config) -> None:
    limit, stack, verdicts = (config.getoption(name, default=None) for name in ("limit", "stack", "verdicts"))
    if limit and stack:
        faulthandler.dump_traceback_later(limit, exit=True, file=stack.open("w"))
    if verdicts is not None:
        config.stash[WRITE] = writer(*verdicts)


def pytest_collection_finish(session: pytest.Session) -> None:
    write(session.config, {"collected": len(session.items)})


def write(config: pytest.Config, line: dict[str, Any]) -> None:
    if (told := config.stash.get(WRITE, None)) is not None:
        told(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("limit", default=None):
        faulthandler.cancel_dump_traceback_later()


def chosen(config: pytest.Config) -> Exercise | None:
    name = config.getoption("exercise", default=None)
    return find(name) if name else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    exercise = chosen(config)
    return True if exercise and collection_path.suffix == ".py" and collection_path != exercise.judge else None


@pytest.fixture(scope="module")
def impl(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The solution that is judged: a module with the parts that the exercise names. While it is judged, it cannot ask the reference."""
    [exercise] = [each for each in exercises().values() if each.judge == request.path]
    path = request.config.getoption("impl", default=None)
    if path is None:
        yield reference(exercise)
        return
    if found := problem(exercise, path):
        raise NotTheirOwn(*found)
    timed = request.config.getoption("speed", default=False) and Timing(exercise)
    request.config.stash[BEFORE] = before = Untouched()
    solution, reason = loaded(path)
    if solution is None:
        pytest.fail(f"{path.name} cannot be loaded: {reason}", pytrace=False)
    if borrowed := elsewhere(exercise, solution, path.resolve()):
        raise NotTheirOwn("rejected", "\n".join(borrowed))
    if wrong := wrong_signatures(exercise, solution):
        pytest.fail("\n".join(wrong), pytrace=False)
    with watching(exercise, solution, path.resolve()) as asked:
        request.config.stash[ASKED] = asked
        yield solution
        if timed and not request.session.testsfailed:
            speed = timed.of(request.config, solution, path)
            not_own = asked[0] if asked else before.changed()
            write(request.config, {"speed": not_own or speed})


class Timing:
    """The functions that an exercise's `[speed]` names, fetched before the solution is loaded."""

    def __init__(self, exercise: Exercise) -> None:
        assert exercise.speed is not None
        self.work, self.twin = named(exercise.speed.work), named(exercise.speed.twin)
        self.same = named(f"{exercise.speed.work.partition(':')[0]}:same")
        self.reference = reference(exercise)

    def of(self, config: pytest.Config, solution: ModuleType, path: Path) -> dict[str, list[float]] | str:
        """The ratios of a solution, or why there are none. It has passed, and stays so, however long this takes."""
        works = {
            TWIN: self.twin,
            REFERENCE: lambda turn: self.work(self.reference, turn),
            OWN: lambda turn: self.work(solution, turn),
        }
        with open(os.devnull, "w") as nowhere:
            if config.getoption("limit"):
                faulthandler.dump_traceback_later(LIMIT, exit=True, file=nowhere)  # in the place of the tests' own
            try:
                return measured(works, self.same)
            except Different as error:
                return str(error)
            except (Exception, SystemExit, pytest.skip.Exception, pytest.exit.Exception) as error:
                return why(error, path)
            finally:
                faulthandler.cancel_dump_traceback_later()


WRITE = pytest.StashKey[Callable[[dict[str, Any]], None]]()
"""Tells whoever waits for the verdict."""


class NotTheirOwn(Exception):
    """(outcome, text) of a file that has its answers from somewhere else, or does not have them."""


BEFORE = pytest.StashKey[Untouched]()
"""What there was before the solution was loaded."""
ASKED = pytest.StashKey[list[str]]()
"""What the solution asked the reference for."""


def loaded(path: Path) -> tuple[ModuleType | None, str]:
    """The module, or why there is none."""
    try:
        return load(path.resolve()), ""
    except (Exception, SystemExit, pytest.skip.Exception, pytest.exit.Exception) as error:
        return None, why(error, path)


def why(error: BaseException, path: Path) -> str:
    """What a file raised when it was loaded, with its line."""
    if isinstance(error, SyntaxError) and error.lineno is None:
        return str(error.msg)
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path.resolve())]
    return f"line {lines[-1] if lines else '?'}: {type(error).__name__}: {error}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """A verdict is shown as it is, without the judge's own code around it."""
    report: Any = yield
    error, outcome = call.excinfo.value if call.excinfo else None, "error"
    asked = list(item.config.stash.get(ASKED, []))
    if (before := item.config.stash.get(BEFORE, None)) is not None and (changed := before.changed()):
        asked.append(changed)
    if asked and call.when == "call":  # even where the solution has hidden the error
        report.outcome, report.longrepr, outcome = "failed", asked[0], "rejected"
        error = error or NotYourOwn(asked[0])
    elif isinstance(error, NotTheirOwn):
        outcome, report.longrepr = error.args
    elif isinstance(error, Rejected):
        report.longrepr, outcome = str(error), "rejected"
    elif isinstance(error, NotImplementedError):
        last = call.excinfo.traceback[-1]  # type: ignore[union-attr]
        report.longrepr, outcome = (
            f"not yet written: {last.name} ({last.path.name}, line {last.lineno + 1})",
            "unwritten",
        )
    if call.when == "call" or error is not None:
        outcome = outcome if error else "passed"
        write(item.config, {"test": item.name, "outcome": outcome, "text": report.longreprtext})
    return report
