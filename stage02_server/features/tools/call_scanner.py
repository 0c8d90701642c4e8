"""Calls that a model writes as JSON, `{"name": "f", "arguments": {...}}`, read as they arrive."""

from __future__ import annotations

import json
import re
from typing import Any

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_BLANK = " \t\r\n"


class Nesting:
    """How deep a JSON text is nested, given one character after the other. `done`: its first bracket is closed."""

    def __init__(self) -> None:
        self.depth = 0
        self.done = self.in_string = False
        self._escaped = False

    def take(self, char: str) -> None:
        """The next character."""
        if self.in_string:
            self._escaped, was = char == "\\" and not self._escaped, self._escaped
            self.in_string = char != '"' or was
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            self.done = self.depth == 0


class CallScanner:
    """Feed it text until `done` or `broken`. Looks at each character once.

    name: the function, as soon as it is known. raw: all text that was taken. The arguments are passed on while the model writes
    them; only if they come before the name, the whole call is awaited. broken: `raw` is not a call. `lenient`: a call may leave
    its arguments out.
    """

    def __init__(self, lenient: bool = True) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self._lenient = lenient
        self._taken: list[str] = []
        self._nesting = Nesting()
        self._begun = False  # something follows the first bracket
        self._headed = (
            False  # the first inner object has begun: these are the arguments, or they are not where they should be
        )
        self._open = False  # inside the arguments

    @property
    def raw(self) -> str:
        """All text that was taken."""
        return "".join(self._taken)

    def feed(self, text: str) -> tuple[str, str]:
        """(what this adds to the arguments, what is not taken)."""
        nesting = self._nesting
        begin = end = place = 0  # the arguments are text[begin:end]
        while place < len(text) and not self.done:
            char = text[place]
            if not self._begun and self._breaks(char):
                self.broken = True
                break
            if char == "{" and nesting.depth == 1 and not nesting.in_string and not self._headed:
                self._read_head(text[:place])
                begin = place
            nesting.take(char)
            self.done = nesting.done
            place += 1
            if self._open:
                end, self._open = place, nesting.depth > 1
        self._taken.append(text[:place])
        return self._whole() if self.done and self.name is None else text[begin:end], text[place:]

    def _breaks(self, char: str) -> bool:
        """An object begins with a bracket, and goes on with a key: other text is told apart before its bracket closes."""
        if char in _BLANK:
            return False
        self._begun = self._nesting.depth == 1
        return char not in ('"}' if self._begun else "{")

    def _read_head(self, text: str) -> None:
        """What comes before the first inner object; `text` is the end of it."""
        self._headed = True
        if head := _HEAD.fullmatch(self.raw + text):
            self.name, self._open = _string(head[1]), True

    def _whole(self) -> str:
        """The arguments of a call that is written in another order."""
        call = json_value(self.raw)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            self.broken = True
            return ""
        if not (self._lenient or "arguments" in call or "parameters" in call):
            self.broken = True
            return ""
        arguments: Any = call.get("arguments", call.get("parameters"))
        try:
            text = (
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
            )
        except ValueError:  # Python reads NaN and 1e999, which JSON cannot hold
            self.broken = True
            return ""
        self.name = unicode_text(call["name"])
        return unicode_text(text)


def json_value(text: str) -> Any:
    """What the JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _string(literal: str) -> str:
    value = json_value(literal)
    return unicode_text(value) if isinstance(value, str) else literal[1:-1]


def unicode_text(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no answer can hold."""
    return text.encode("utf-8", errors="replace").decode()
