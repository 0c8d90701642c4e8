"""One call of a function, `{"name": "f", "arguments": {...}}`, read while the model writes it."""

from __future__ import annotations

import json
import re
from typing import Any

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallScanner:
    """Feed it text until `done` or `broken`.

    name: the function, as soon as it is known. raw: all text that was taken. The arguments are passed on as the model writes
    them, while it does; only when they come before the name, all of it is waited for. broken: this is no
    call, which `raw` shows.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self.done = self.broken = False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._sent = self._end = 0  # the arguments are raw[...:_end], of which raw[...:_sent] was passed on
        self._open = False  # inside the arguments

    def feed(self, text: str) -> tuple[str, str]:
        """(what this adds to the arguments, what is not taken)."""
        place = len(self.raw)
        self.raw += text
        may_begin = "{" in text and not (self._in_string and '"' not in text)  # the brace that _HEAD looks for is new
        if self.name is None and may_begin and (head := _HEAD.match(self.raw)):
            self.name, self._open = _string(head[1]), True
            self._sent = self._end = head.end()
        while place < len(self.raw) and not self.done:
            if not self._depth and self.raw[place] not in "{ \t\r\n":
                self.broken = True
                break
            self._take(self.raw[place], place)
            place += 1
        taken, rest = self.raw[:place], self.raw[place:]
        added = self._whole(taken) if self.done and self.name is None else self.raw[self._sent : self._end]
        self.raw, self._sent = taken, self._end
        return added, rest

    def _take(self, char: str, place: int) -> None:
        if self._in_string:
            self._escaped, was = char == "\\" and not self._escaped, self._escaped
            self._in_string = char != '"' or was
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        if self._open and place >= self._end:
            self._end, self._open = place + 1, self._depth > 1

    def _whole(self, text: str) -> str:
        """The arguments of a call that is written in another order."""
        call = _value(text)
        arguments: Any = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            self.broken = True
            return ""
        self.name = _unicode(call["name"])
        return _unicode(arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _string(literal: str) -> str:
    value = _value(literal)
    return _unicode(value) if isinstance(value, str) else literal[1:-1]


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no answer can hold."""
    return text.encode("utf-8", errors="replace").decode()
