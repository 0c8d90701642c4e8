"""What the course knows of an exercise: its `exercise.toml`, its starter, and where the reader's own file lies."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from stage01_cli.tools.course.exercised import COUNTS
from stage01_cli.tools.course.load import Ask, asks, check_number, check_text
from stage03_engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "notebooks" / "exercises"
JUDGES = ROOT / "tests" / "exercises"
WORK = ROOT / "work"
"""Where the reader writes; git ignores it."""


@dataclass(frozen=True)
class Serving:
    """How the real server is started with the reader's part, what it is asked, and what that must exercise.

    load        the requests: rows of `[[serve.load]]`, see load.py
    exercises   names of exercised.COUNTS, and how many of each a run must show at least, or it proves nothing
    together    the front end hears of so many steps of the engine at once, as a slow one does
    compare     "decisions" (and answers), or only "answers" where decisions are the reader's own
    no_less     then, names of exercised.COUNTS in which the part must not fall behind the reference
    pace        "engine": it keeps the load's pace, step by step; "clients": they do, where there are several engines
    """

    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # of a --config file
    load: tuple[Ask, ...] = ()
    exercises: dict[str, int] = field(default_factory=dict)
    together: int = 1
    compare: str = "decisions"
    no_less: tuple[str, ...] = ()
    pace: str = "engine"
    prepare: str = ""  # module:function, called with the path of the part; gives further flags
    after: str = ""  # a function of the reader's file: it is given the run's events, and must find nothing


def _serving(values: dict[str, Any]) -> Serving:
    """Raises ValueError for what is not known, as a count that nobody counts, and for a value of another kind."""
    if unknown := [name for name in values if name not in {each.name for each in fields(Serving)}]:
        raise ValueError(f"[serve] has no {unknown[0]!r}")
    for key, kind in {
        "flags": list,
        "load": list,
        "environment": dict,
        "config": dict,
        "exercises": dict,
        "no_less": list,
    }.items():
        if not isinstance(values.get(key, kind()), kind):
            raise ValueError(f"{key} = {values[key]!r} must be a {'list' if kind is list else 'table'}")
    for key in ("prepare", "after"):
        check_text(key, values.get(key, ""))
    for flag in values.get("flags", ()):
        check_text("one of flags", flag)
    for name, value in values.get("environment", {}).items():
        check_text(name, value)
    for name, value in values.get("exercises", {}).items():
        check_number(name, value, 1)
    check_number("together", values.get("together", 1), 1)
    if values.get("compare", "decisions") not in ("decisions", "answers"):
        raise ValueError(f"compare = {values['compare']!r} must be 'decisions' or 'answers'")
    if values.get("pace", "engine") not in ("engine", "clients"):
        raise ValueError(f"pace = {values['pace']!r} must be 'engine' or 'clients'")
    rows = values.get("load", [])
    if not all(isinstance(row, dict) for row in rows) or not any("path" not in row for row in rows):
        raise ValueError("[[serve.load]] must be tables, and one of them a completion, without a path")
    counted = [*values.get("exercises", {}), *values.get("no_less", ())]
    if unknown := [name for name in counted if name not in COUNTS]:
        raise ValueError(f"[serve] counts {unknown[0]}, which course/exercised.py does not know")
    lists = {key: tuple(values.get(key, ())) for key in ("flags", "no_less")}
    return Serving(**values | lists | {"load": asks(rows)})


@dataclass(frozen=True)
class Timed:
    """What `--speed` measures: functions of a module in tests/exercises, as `module:name`. The module has `same`, too, which compares results.

    work   called with the parts and the number of a call; gives the call that is timed
    twin   the same of the plain twin; called with the number alone
    note   what the time means, if that needs saying
    """

    work: str
    twin: str
    note: str = ""


@dataclass(frozen=True)
class Exercise:
    """One `exercise.toml`.

    `parts` names what the reader writes, and for each the reference that it replaces, as `module:name`; `contract` gives a
    name to each sentence that a judge may find broken.
    """

    number: int
    name: str
    title: str
    goal: str
    phase: int
    minutes: int
    hints: tuple[str, ...]
    here: tuple[str, ...]
    vllm: tuple[str, ...]
    plugs_in: str
    parts: dict[str, str]
    contract: dict[str, str]
    needs: tuple[int, ...] = ()
    points: int = 10
    tensors: bool = False  # its check imports torch: 20 seconds instead of 5
    alone: bool = False  # a file that imports anything of the project is not a solution
    serve: Serving = Serving()
    speed: Timed | None = None

    @property
    def folder(self) -> Path:
        """Where README.md, starter.py and mutants/ are."""
        return FOLDER / self.name

    @property
    def starter(self) -> Path:
        """The file that `start` copies."""
        return self.folder / "starter.py"

    @property
    def judge(self) -> Path:
        """The tests that say whether a solution keeps the contract."""
        return JUDGES / f"test_{self.name}.py"

    @property
    def own_reference(self) -> Path:
        """The reference solution of an open-ended exercise; there is none where the project's own parts are."""
        return self.folder / "reference.py"

    def solution(self, work: Path) -> Path:
        """The reader's own file."""
        return work / f"{self.name}.py"


@cache
def exercises() -> dict[int, Exercise]:
    """All of them, by number. Raises ConfigError where an exercise.toml is wrong, or the folder is missing."""
    if not FOLDER.is_dir():
        raise ConfigError(
            f"the exercises are not here: {FOLDER} is missing; the course needs a checkout of the project"
        )
    found = (_read(path) for path in sorted(FOLDER.glob("ex[0-9][0-9]_*/exercise.toml")))
    return {exercise.number: exercise for exercise in found}


def _read(path: Path) -> Exercise:
    name = path.parent.name
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        values |= {key: tuple(values[key]) for key in ("hints", "here", "vllm", "needs") if key in values}
        if "serve" in values:
            if not isinstance(values["serve"], dict):
                raise ValueError("serve must be a table")
            values["serve"] = _serving(values["serve"])
        if "speed" in values:
            values["speed"] = Timed(**values["speed"])
        return Exercise(number=int(name[2:4]), name=name, **values)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.relative_to(ROOT)}: {error}") from error


def find(what: str | int) -> Exercise:
    """The exercise that `5`, `05`, `ex05`, `ex05_scheduler` or `scheduler` means. Raises ConfigError if there is none."""
    text = str(what).strip().lower()
    number = re.fullmatch(r"(?:ex)?(\d{1,2})", text)
    for exercise in exercises().values():
        if (number and int(number[1]) == exercise.number) or text in (exercise.name, exercise.name[5:]):
            return exercise
    raise ConfigError(f"no exercise {what!r}; `stages course list` shows all")


def in_project(path: Path) -> str:
    """A path as a reader at the project's root writes it; whole for a reader who is elsewhere."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and Path.cwd().is_relative_to(ROOT) else str(path)


def next_line(verb: str, exercise: Exercise, work: Path) -> str:
    """What the reader types next: `stages course check 5`, with the folder, if it is not the usual one."""
    more = "" if work.resolve() == WORK else f" --work {shlex.quote(str(work))}"
    return f"stages course {verb} {exercise.number}{more}"


def parsed(source: str | bytes) -> ast.Module:
    """The tree of a source. Python 3.11 counts the depth of trees once for the whole process: a traceback that another
    thread or a finalizer formats meanwhile (it parses too) makes it SystemError, so it is tried again."""
    for _ in range(9):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)
