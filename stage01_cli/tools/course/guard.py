"""Watch a student's file while it runs: whoever it asks, and by whatever way, it may not have its answers from the reference.

The code of each function of the reference that the student is to write is exchanged for a door-keeper, in the function itself: so it does
not matter under which name, or through which object, it is called. The judge, and the project's own modules, still get the answer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from stage01_cli.tools.course.exercises import JUDGES, ROOT, Exercise
from stage01_cli.tools.course.own import function_of, references


class NotYourOwn(Exception):
    """The student's part called the reference."""


class Guard:
    """Between the reference of an exercise and the file of a student."""

    def __init__(self, solution: Path, own: dict[str, Any], caught: Callable[[str], None]) -> None:
        """`own` are the student's parts by their names; `caught` is told of each call, and may raise."""
        self.solution, self.caught = str(solution), caught
        self.classes = {name: part for name, part in own.items() if isinstance(part, type)}
        self._undo: list[Callable[[], None]] = []
        self._references: set[CodeType] = set()

    def keep(self, module: ModuleType, name: str) -> None:
        """Let nobody ask the function `name` of a module without being looked at."""
        function = function_of(module, name)
        if function is None or function.__code__.co_filename == self.solution:
            return
        real = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        real.__kwdefaults__ = function.__kwdefaults__
        kernel = _interpreted(module, name)
        if kernel is not None:
            real = kernel.rewrite()
        self._references.add(real.__code__)

        def ask(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if line := self.line(name, arguments):
                self.caught(f"Write {name} yourself: yours calls the reference's, in line {line}.")
            return real(*arguments, **options)

        code = _calls(ask, real.__code__)
        if kernel is not None:
            kept = FunctionType(code, real.__globals__, real.__name__, None, real.__closure__)
            # by these it is launched
            kept.__signature__, kept.__annotations__ = inspect.signature(real), real.__annotations__  # type: ignore[attr-defined]
            kernel.rewritten_fn[kernel.fn] = kept
            self._undo.append(lambda: kernel.rewritten_fn.update({kernel.fn: real}))
        else:
            before, function.__code__ = function.__code__, code
            self._undo.append(lambda: setattr(function, "__code__", before))

    def line(self, name: str, arguments: tuple[Any, ...]) -> int | None:
        """Where the student's file asks for this answer; None if it is not the student who asks.

        A function may not be called from the student's file, nor a method with an object of the student's. Neither may be reached from
        the student's own version of it, whoever lies between, but for the judge.
        """
        owner = name.rpartition(".")[0]
        mine = not owner or (bool(arguments) and isinstance(arguments[0], self.classes.get(owner, ())))
        frame: FrameType | None = sys._getframe(2)
        direct = True
        while frame is not None:
            code = frame.f_code
            if code.co_filename == self.solution:
                if (direct and mine) or _name(code) == name:
                    return frame.f_lineno
            elif code.co_filename.startswith(str(JUDGES)):
                return None
            elif code.co_filename.startswith(str(ROOT)) and not code.co_filename.startswith(sys.prefix):
                direct = direct and (code in self._references or code.co_filename == __file__)
            frame = frame.f_back
        return None

    def remove(self) -> None:
        """The reference is as it was."""
        while self._undo:
            self._undo.pop()()


def _name(code: CodeType) -> str:
    return code.co_qualname.partition(".<locals>")[0]


_PLACE = "whom to ask"


def _template(*arguments: Any, **options: Any) -> Any:
    return "whom to ask".__call__(arguments, options)  # type: ignore[operator]


def _calls(ask: Callable[..., Any], real: CodeType) -> CodeType:
    """Code that hands its arguments to `ask`, and fits into the place of `real`."""
    code = _template.__code__
    return code.replace(
        co_consts=tuple(ask if each == _PLACE else each for each in code.co_consts), co_freevars=real.co_freevars,
        co_name=real.co_name, co_qualname=real.co_qualname, co_filename=real.co_filename, co_firstlineno=real.co_firstlineno,
    )  # fmt: skip


def _interpreted(module: ModuleType, name: str) -> Any:
    """A kernel that Triton's interpreter runs: it makes a function of its own from the text."""
    found = vars(module).get(name)
    return found if type(found).__name__ == "InterpretedFunction" else None


LEFT_ALONE = (
    "stage0",
    "stagetrace",
    "judging",
    "test_ex",
    "conftest",
    "speed_",
    "attention_batch",
    "builtins",
    "math",
    "json",
)
"""How the names of modules begin that nobody changes while a part is judged."""


class Untouched:
    """What modules and classes hold, as it was before a student's file was loaded."""

    def __init__(self) -> None:
        self._before = dict(_held())

    def changed(self) -> str | None:
        """A sentence for the first function or class that is another one now."""
        now = dict(_held())
        for (place, name), value in self._before.items():
            if now.get((place, name)) is not value:
                return f"It may not change what it did not write: {name} of {place} was another one before your file was loaded."
        return None


def _held() -> Iterator[tuple[tuple[str, str], Any]]:
    for place, module in list(sys.modules.items()):
        if not place.startswith(LEFT_ALONE):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type | FunctionType | BuiltinFunctionType):
                yield (place, name), value
            if isinstance(value, type) and value.__module__ == place:
                members = [(key, each) for key, each in vars(value).items() if isinstance(each, METHODS)]
                yield from (((f"{place}.{name}", key), each) for key, each in members)


METHODS = FunctionType | property | staticmethod | classmethod


@contextmanager
def watching(exercise: Exercise, solution: ModuleType, path: Path) -> Iterator[list[str]]:
    """While the student's module, loaded from the path, is judged, NotYourOwn is raised when it calls the reference. Yields a list, to
    which each such call is added: the student may hide the exception."""
    found: list[str] = []

    def caught(text: str) -> None:
        found.append(text)
        raise NotYourOwn(text)

    guard = Guard(path, {name: getattr(solution, name, None) for name in exercise.parts}, caught)
    try:
        for module, names in references(exercise).items():
            for name in names:
                guard.keep(import_module(module), name)
        yield found
    finally:
        guard.remove()
