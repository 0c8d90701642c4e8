"""Tool calls in the text of an answer (vllm/tool_parsers).

A parser of your own: `--tool-parser-plugin my_parser.py`, a file that puts its class into TOOL_PARSERS.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stage02_server.features.tools.answer_parser import AnswerDelta, split_held_back

BEGIN, END = "<tool_call>", "</tool_call>"


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')


class CallScanner:
    """Feed it text until `done` or `broken`. Looks at each character once.

    name: the function, as soon as it is known. raw: all text that was taken. The arguments are passed on while the model writes
    them; only if they come before the name, the whole call is awaited. broken: `raw` is not a call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self._taken: list[str] = []
        self._depth, self._in_string, self._escaped = 0, False, False
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
        begin = end = place = 0  # the arguments are text[begin:end]
        while place < len(text) and not self.done:
            char = text[place]
            if not self._depth and char not in "{ \t\r\n":
                self.broken = True
                break
            if char == "{" and self._depth == 1 and not self._in_string and not self._headed:
                self._read_head(text[:place])
                begin = place
            self._take(char)
            place += 1
            if self._open:
                end, self._open = place, self._depth > 1
        self._taken.append(text[:place])
        return self._whole() if self.done and self.name is None else text[begin:end], text[place:]

    def _read_head(self, text: str) -> None:
        """What comes before the first inner object; `text` is the end of it."""
        self._headed = True
        if head := _HEAD.fullmatch(self.raw + text):
            self.name, self._open = _string(head[1]), True

    def _take(self, char: str) -> None:
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

    def _whole(self) -> str:
        """The arguments of a call that is written in another order."""
        call = _value(self.raw)
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


class HermesToolParser:
    """`text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text`, as Hermes and Qwen write calls.

    What is between the tags but is not a call stays content, tags and all. The text that waits is in `_held`.
    """

    def __init__(self) -> None:
        self._held = ""
        self._call: CallScanner | None = None
        self._num_calls = 0
        self._closing = False  # after a call: its end tag and white space are not content

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """As `Parser.feed`."""
        delta = AnswerDelta()
        self._held += text
        while self._held or (finished and self._call):
            if self._call is not None:
                if not self._read_call(self._call, delta, finished):
                    break
            elif self._closing:
                if not self._read_end(finished):
                    break
            elif not self._read_content(delta, finished):
                break
        return delta

    def _read_content(self, delta: AnswerDelta, finished: bool) -> bool:
        """These three return True when there is more to read."""
        content, tag, rest = self._held.partition(BEGIN)
        if tag:
            self._call, self._held = CallScanner(), rest
        else:
            content, self._held = (content, "") if finished else split_held_back(content, BEGIN)
        delta.content += content
        return bool(tag)

    def _read_call(self, call: CallScanner, delta: AnswerDelta, finished: bool) -> bool:
        known = call.name
        arguments, rest = call.feed(self._held)
        self._held = ""
        if call.broken or (finished and call.name is None):
            delta.content += BEGIN + call.raw
            self._call, self._held = None, rest
            return True
        if arguments or call.name != known:
            delta.add_call(self._num_calls, call.name if known is None else None, arguments)
        if not call.done:
            return False
        self._call, self._held, self._closing = None, rest, True
        self._num_calls += 1
        return True

    def _read_end(self, finished: bool) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(END):
            self._held = self._held.removeprefix(END)
            return bool(self._held)
        self._closing = END.startswith(self._held) and not finished
        return not self._closing


class RequiredToolParser:
    """`[{"name": "f", "parameters": {...}}, ...]`, which the grammar of tool_choice "required" allows."""

    def __init__(self) -> None:
        self._call: CallScanner | None = None
        self._num_calls = 0
        self._is_text = False  # no grammar applied, as with the echo engine

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """As `Parser.feed`."""
        delta = AnswerDelta(content=text if self._is_text else "")
        while text and not self._is_text:
            if self._call is None:
                text = text.lstrip("[], \t\r\n")
                self._call = CallScanner() if text else None
                continue
            known = self._call.name
            arguments, text = self._call.feed(text)
            if self._call.broken:
                delta.content, self._is_text = self._call.raw + text, True
                break
            if arguments or self._call.name != known:
                delta.add_call(self._num_calls, self._call.name if known is None else None, arguments)
            if self._call.done:
                self._call, self._num_calls = None, self._num_calls + 1
        return delta


class NamedToolParser:
    """The answer is the arguments of the one function that the request chose."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """As `Parser.feed`."""
        delta = AnswerDelta()
        if text:
            delta.add_call(0, self._name, text)
            self._name = None
        return delta


TOOL_PARSERS: dict[str, type] = {"hermes": HermesToolParser}
"""`--tool-call-parser` -> a class whose objects are made without arguments and are a `Parser`."""
