"""What the judges share: load a solution, hold it against a sentence of the contract, and say what is wrong so that it helps.

    judge = Judge(5)

    @judge.settings()
    @given(loads())
    def test_budget(impl, load):
        with judge.case(load=load):
            for step in run(impl.Scheduler, load):
                judge.holds("budget", step.tokens <= load.budget, f"at most {load.budget} tokens", f"{step.tokens} tokens")

A broken sentence raises `Rejected`. Whatever else the solution raises inside `judge.case` becomes a Rejected too, with the line of
the solution where it happened; only NotImplementedError goes through: it is a part that is still to be written. An error of those
in UNFIT that is raised elsewhere comes from what the solution returned, most often None: the reference would raise it, too, if the judge were wrong.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from stage01_cli.tools.course.exercises import Exercise, exercises
from stage01_cli.tools.course.guard import NotYourOwn

LONGEST = 600  # characters of an input that are shown
UNFIT = (TypeError, AttributeError, ValueError, LookupError, RuntimeError)
"""What is raised by code that was given something of another kind than it expects. Not Hypothesis's own exceptions."""
_numbers = count()


class Rejected(AssertionError):
    """A solution broke a sentence of the contract: with which input, what was expected, what came."""

    def __init__(self, key: str, sentence: str, given: dict[str, Any], expected: Any, got: Any) -> None:
        self.key, self.sentence, self.given, self.expected, self.got = key, sentence, given, expected, got
        super().__init__(str(self))

    def __str__(self) -> str:
        """The verdict as the reader sees it."""
        lines = [f'broken: "{self.sentence}"']
        lines += [f"  {name:9} {_shown(value)}" for name, value in self.given.items()]
        return "\n".join([*lines, f"  {'expected':9} {_shown(self.expected)}", f"  {'got':9} {_shown(self.got)}"])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


@cache
def _kind(key: str) -> type[Rejected]:
    """A class of its own for each sentence: Hypothesis shrinks an input only as long as the same sentence is broken."""
    return type(f"Rejected_{key}", (Rejected,), {})


class Judge:
    """The contract of one exercise."""

    def __init__(self, number: int) -> None:
        self.exercise = exercises()[number]
        self._given: dict[str, Any] = {}

    def settings(self, examples: int = 100) -> Callable[[Any], Any]:
        """For a property: the same examples every time, no deadline, one verdict. Where tests try fewer than the usual 100, so do these."""
        if settings.default.max_examples < 100:  # `make test`, for the reference
            examples = min(examples, settings.default.max_examples)
        return settings(
            max_examples=examples, derandomize=True, database=None, deadline=None, report_multiple_bugs=False,
            phases=(Phase.explicit, Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
        )  # fmt: skip

    @contextmanager
    def case(self, **given: Any) -> Iterator[None]:
        """What is shown of the input when something in the block is wrong; cases may be nested."""
        before, self._given = self._given, self._given | given
        try:
            yield
        except (Rejected, NotImplementedError, NotYourOwn):
            raise
        except (Exception, SystemExit) as error:
            line, said = _line_in_solution(error), f"{type(error).__name__}: {error}"
            if line is not None:
                self.rejects("works", "no exception", f"{said} ({line})", error)
            if not isinstance(error, UNFIT):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1].line
            self.rejects(
                "works",
                "results of the kind that the starter says",
                f"{said}, where they are used: {where} (is a `return` missing?)",
                error,
            )
        finally:
            self._given = before

    def rejects(self, key: str, expected: Any, got: Any, cause: BaseException | None = None) -> None:
        """Raise Rejected for the sentence with this name. `works` stands for any sentence: the code raised something."""
        sentence = self.exercise.contract.get(key, "It works." if key == "works" else "")
        assert sentence, f"{self.exercise.name} has no sentence {key!r} in its contract"
        rejected = _kind(key)(key, sentence, dict(self._given), expected, got)
        try:
            raise rejected from cause
        finally:
            # Hypothesis tells failures apart by their contexts, too; and the line of an exception may differ from one run of a
            # function to the next, when Python has specialised its code.
            rejected.__context__ = None

    def equal(self, key: str, expected: Any, got: Any) -> None:
        """The two must be equal."""
        if not bool(expected == got):
            self.rejects(key, expected, got)

    def holds(self, key: str, condition: bool, expected: Any, got: Any) -> None:
        """The condition must be true; the two texts say what it means."""
        if not condition:
            self.rejects(key, expected, got)

    def raises(self, key: str, kind: type[Exception], work: Callable[[], Any]) -> None:
        """The call must raise this kind of exception."""
        try:
            got = work()
        except kind:
            return
        except (NotImplementedError, NotYourOwn):
            raise
        except Exception as error:
            self.rejects(key, f"a {kind.__name__}", f"{type(error).__name__}: {error}", error)
        else:
            self.rejects(key, f"a {kind.__name__}", f"no exception, but {_shown(got)}")


def _line_in_solution(error: BaseException) -> str | None:
    """Where in the file of a solution this was raised: its innermost line there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_solution(frame.filename)]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}" if frames else None


_files: set[str] = set()


def _is_solution(filename: str) -> bool:
    return filename in _files


def count_as_solution(path: Path) -> None:
    """An exception from this file is the solution's, not the judge's."""
    _files.add(str(path))


def load(path: Path) -> ModuleType:
    """The module in a file of the reader's. Raises whatever its code raises."""
    name = f"solution_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    count_as_solution(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def reference(exercise: Exercise) -> ModuleType:
    """The project's own parts, as if they were somebody's solution; of an open-ended exercise, `reference.py` beside the starter."""
    if exercise.own_reference.is_file():
        return load(exercise.own_reference)
    module = ModuleType(f"reference_{exercise.name}")
    for name, where in exercise.parts.items():
        setattr(module, name, named(where))
    return module


def named(where: str) -> Any:
    """What `module:name` names."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def wrong_signatures(exercise: Exercise, module: ModuleType) -> list[str]:
    """What differs between the signatures of the starter and those of a module: everything that the starter defines must
    be there and take the same arguments. Empty if all is well."""
    return [
        f"{name} takes {theirs}, not {got}" if got else f"{name} is missing"
        for name, theirs in signatures(load(exercise.starter), exercise).items()
        if (got := signatures(module, exercise, inherited=True).get(name)) != theirs
    ]


def signatures(module: ModuleType, exercise: Exercise, inherited: bool = False) -> dict[str, str]:
    """Name -> its parameters with their defaults, without types, for each function and method of the parts."""
    found: dict[str, str] = {}
    for name in exercise.parts:
        part = getattr(module, name, None)
        if isinstance(part, type):
            found[name] = "a class"
            members = {key: value for each in reversed(part.__mro__[:-1]) for key, value in vars(each).items()}
            for key, value in (members if inherited else vars(part)).items():
                if inspect.isfunction(value := inspect.unwrap(getattr(value, "__func__", value))):
                    found[f"{name}.{key}"] = _parameters(value)
        elif callable(part):
            found[name] = _parameters(inspect.unwrap(getattr(part, "fn", part)))
        elif part is not None:
            found[name] = "a value"
    return found


def _parameters(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    plain = [each.replace(annotation=inspect.Parameter.empty, default=_default(each.default)) for each in parameters]
    return str(inspect.Signature(plain))


def _default(value: Any) -> Any:
    """A function that is a default is another object in each file: its name stands for it."""
    return value.__name__ if inspect.isfunction(value) else value


def text_of(path: Path, name: str) -> str:
    """The text that a file assigns to a name at its top level, read without running it. Raises KeyError if there is none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(ast.literal_eval(node.value))
    raise KeyError(f"{path.name} has no {name}")


def judge_functions(exercise: Exercise) -> list[Callable[..., Any]]:
    """The test functions of an exercise's judge, in the order in which they stand, with as many examples as a student's check has."""
    name, before = f"{exercise.judge.stem}_as_checked", settings.get_current_profile_name()
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, exercise.judge)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        settings.load_profile("judge")
        try:
            spec.loader.exec_module(module)
        finally:
            settings.load_profile(before)
    return [value for name, value in vars(sys.modules[name]).items() if name.startswith("test_")]


def verdict(exercise: Exercise, impl: ModuleType) -> Exception | None:
    """What the first test of the judge that fails raises, or None if the solution passes."""
    for function in judge_functions(exercise):
        try:
            function(impl=impl)
        except (Rejected, NotImplementedError) as error:
            return error
    return None
