"""`pytest tests/exercises --exercise 5 --impl work/ex05_scheduler.py` judges a solution. Without --impl the project's own parts are judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from judging import Rejected, load, reference, wrong_signatures

from stage01_cli.tools.course.exercises import Exercise, exercises, find


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exercise", help="judge this exercise alone: 5, ex05 or scheduler")
    parser.addoption("--impl", type=Path, help="the file to judge; without it the project's own part is judged")


def chosen(config: pytest.Config) -> Exercise | None:
    name = config.getoption("exercise", default=None)
    return find(name) if name else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    exercise = chosen(config)
    return True if exercise and collection_path.suffix == ".py" and collection_path != exercise.judge else None


@pytest.fixture(scope="module")
def impl(request: pytest.FixtureRequest) -> ModuleType:
    """The solution that is judged: a module with the parts that the exercise names."""
    [exercise] = [each for each in exercises().values() if each.judge == request.path]
    path = request.config.getoption("impl", default=None)
    if path is None:
        return reference(exercise)
    solution = load(path.resolve())
    if wrong := wrong_signatures(exercise, solution):
        pytest.fail("\n".join(wrong), pytrace=False)
    return solution


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """A verdict is shown as it is, without the judge's own code around it."""
    report: Any = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, Rejected):
        report.longrepr = str(error)
    elif isinstance(error, NotImplementedError):
        last = call.excinfo.traceback[-1]  # type: ignore[union-attr]
        report.longrepr = f"not yet written: {last.name} ({last.path.name}, line {last.lineno + 1})"
    return report
