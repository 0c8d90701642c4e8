"""How much a solution does, counted rather than timed: the lines that it runs, and the characters, bytes and numbers that it looks at.

Two counts say how the work grows: with the length of a text, or with its square. No clock, so no machine decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WALKS_THROUGH = frozenset(
    {"decode", "encode", "split", "splitlines", "partition", "rpartition", "replace", "count", "translate"}
)
"""Methods of texts and bytes that go through all of it."""


class Work:
    """A counter."""

    def __init__(self) -> None:
        self.done = 0

    @contextmanager
    def of(self, *functions: Callable[..., Any]) -> Iterator[None]:
        """Count what code from the files of these functions does within the block."""
        files = {function.__code__.co_filename for function in functions}
        before = sys.gettrace(), sys.getprofile()

        def line(frame: Any, event: str, arg: Any) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            self.done += 1
            return line

        def call(frame: Any, event: str, arg: Any) -> None:
            whose = getattr(arg, "__self__", None)
            if (
                event == "c_call"
                and type(whose) in (str, bytes)
                and arg.__name__ in WALKS_THROUGH
                and frame.f_code.co_filename in files
            ):
                self.done += len(whose)

        sys.settrace(line)
        sys.setprofile(call)
        try:
            yield
        finally:
            sys.setprofile(before[1])
            sys.settrace(before[0])


def counted_text(work: Work, text: str) -> str:
    """A text that counts the characters that are searched or copied out of it, and so does whatever it is added to."""

    class Text(str):
        def _from(self, start: Any = None, end: Any = None) -> None:
            work.done += len(range(*slice(start, end).indices(len(self))))

        def find(self, what: str, *places: Any) -> int:  # type: ignore[override]
            self._from(*places)
            return str.find(self, what, *places)

        def rfind(self, what: str, *places: Any) -> int:  # type: ignore[override]
            self._from(*places)
            return str.rfind(self, what, *places)

        def index(self, what: str, *places: Any) -> int:  # type: ignore[override]
            self._from(*places)
            return str.index(self, what, *places)

        def count(self, what: str, *places: Any) -> int:  # type: ignore[override]
            self._from(*places)
            return str.count(self, what, *places)

        def partition(self, what: str) -> Any:
            self._from()
            return str.partition(self, what)

        def split(self, *how: Any) -> Any:  # type: ignore[override]
            self._from()
            return str.split(self, *how)

        def __contains__(self, what: str) -> bool:  # type: ignore[override]
            self._from()
            return str.__contains__(self, what)

        def __getitem__(self, where: Any) -> str:
            found = str.__getitem__(self, where)
            work.done += len(found)
            return Text(found)

        def __add__(self, other: str) -> str:
            return Text(str(self) + str(other))

        def __radd__(self, other: str) -> str:
            return Text(str(other) + str(self))

        def __str__(self) -> str:
            return str.__str__(self)

    return Text(text)


def counted_bytes(work: Work, raw: bytes) -> bytes:
    """Bytes that count how many of them are decoded, and so do those to which they are added."""

    class Bytes(bytes):
        def decode(self, *how: Any, **named: Any) -> str:
            work.done += len(self)
            return bytes.decode(self, *how, **named)

        def __getitem__(self, where: Any) -> Any:
            found = bytes.__getitem__(self, where)
            return Bytes(found) if isinstance(found, bytes) else found

        def __add__(self, other: Any) -> bytes:
            return Bytes(bytes.__add__(self, other))

        def __radd__(self, other: Any) -> bytes:
            return Bytes(other + bytes(memoryview(self)))

    return Bytes(raw)


def counted_numbers(work: Work, numbers: list[int]) -> list[int]:
    """The same numbers, which count how often one is compared or hashed, also where Python itself does so. No two are one object."""

    class Number(int):
        def __eq__(self, other: object) -> bool:
            work.done += 1
            return int.__eq__(self, other) is True

        def __ne__(self, other: object) -> bool:
            work.done += 1
            return int.__ne__(self, other) is True

        def __hash__(self) -> int:
            work.done += 1
            return int.__hash__(self)

    return [Number(number) for number in numbers]
