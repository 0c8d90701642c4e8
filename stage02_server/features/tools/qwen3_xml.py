"""Calls as Qwen3-Coder and its successors write them, with a tag for each parameter (vllm/parser/qwen3.py).

    text <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call> text

The values have no quotes, so the tools' schemas say which of them are strings. These are passed on while the model writes them; what may be
a number, or a list, is awaited. As in vLLM, the outer tag may be missing, the next tag ends a value that has no end of its own, and what is between
the parameters is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Self

from stage02_server.features.tools.answer_parser import first_of, split_held_back
from stage02_server.features.tools.calls_in_text import MAX_NAME, CallsInText, Reader, Tell
from stage02_server.features.tools.fields import ToolParam
from stage02_server.features.tools.parameter_types import Types, as_json, parameter_types

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_BETWEEN = (
    _PARAMETER,
    _FUNCTION_END,
    _CALL_END,
    _CALL,
    _FUNCTION,
)  # the last two: the next call begins, this one has no end
_IN_VALUE = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)


class FunctionCall(Reader):
    """One call. `_step` reads what comes next, and returns what is left; what must be seen together with more is in `_held`."""

    def __init__(self, begin: str, tell: Tell, types: Types) -> None:
        super().__init__(begin, tell)
        self._types = types
        self._function: dict[str, frozenset[str]] = {}  # its parameters
        self._step = self._read_name if begin == _FUNCTION else self._read_begin
        self._held = ""
        self._brace = "{"  # comes before the next parameter
        self._key = ""
        self._value_types: frozenset[str] = frozenset()
        self._value: list[str] | None = None  # None: a string, which is passed on at once
        self._is_first_line = False

    def read(self, text: str, finished: bool) -> str:
        """As `Reader.read`."""
        text, self._held = self._held + text, ""
        while text and not self.done:
            text = self._step(text)
        if finished and self._untold:
            self._untold.append(self._held)
        elif finished and self._step == self._read_value:
            self._add(self._held)
        return text

    def _hold(self, text: str) -> str:
        self._held = text
        return ""

    def _read_begin(self, text: str) -> str:
        stripped = text.lstrip()
        self._untold.append(text[: len(text) - len(stripped)])
        if stripped.startswith(_FUNCTION):
            self._untold.append(_FUNCTION)
            self._step = self._read_name
            return stripped.removeprefix(_FUNCTION)
        return self._hold(stripped) if _FUNCTION.startswith(stripped) else self.end(stripped)

    def _read_name(self, text: str) -> str:
        name, end, _ = text[: MAX_NAME + 1].partition(">")
        if len(name) > MAX_NAME or any(char.isspace() or char in "<{\"'" for char in name) or (end and not name):
            return self.end(text)
        if not end:
            return self._hold(text)
        self._function = self._types.get(name, {})
        self._step = self._read_between
        self.tell(name, "")
        return text[len(name) + 1 :]

    def _read_between(self, text: str) -> str:
        """Up to the next parameter, or the end."""
        place, tag = first_of(text, _BETWEEN)
        if not tag:
            return self._hold(split_held_back(text, *_BETWEEN)[1])
        if tag == _PARAMETER:
            self._step = self._read_key
            return text[place + len(tag) :]
        self.tell(None, "{}" if self._brace == "{" else "}")
        return self.end(text[place:] if tag in (_CALL, _FUNCTION) else text[place + len(tag) :])

    def _read_key(self, text: str) -> str:
        self._key, end, _ = text[: MAX_NAME + 1].partition(">")
        if not end and len(self._key) <= MAX_NAME:
            return self._hold(text)
        if not end:
            self._step = self._read_between
            return text
        self._step, self._is_first_line = self._read_value, True
        self._value_types = self._function.get(self._key, frozenset())
        self._value = [] if self._value_types - {"string"} else None
        if self._value is None:
            self._tell_key('"')
        return text[len(self._key) + 1 :]

    def _read_value(self, text: str) -> str:
        if self._is_first_line:
            self._is_first_line = False
            return text.removeprefix("\n")
        place, tag = first_of(text, _IN_VALUE)
        if not tag:
            value = split_held_back(text, *_IN_VALUE)[0].removesuffix("\n")
            self._add(value)
            return self._hold(text[len(value) :])
        self._add(text[:place].removesuffix("\n"))
        if self._value is None:
            self.tell(None, '"')
        else:
            self._tell_key(as_json("".join(self._value), self._value_types))
        self._step = self._read_between
        return text[place + len(tag) :] if tag == _PARAMETER_END else text[place:]

    def _add(self, text: str) -> None:
        """More of the value."""
        if self._value is not None:
            self._value.append(text)
        elif text:
            self.tell(None, json.dumps(text, ensure_ascii=False)[1:-1])

    def _tell_key(self, value: str) -> None:
        self.tell(None, f"{self._brace}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._brace = ", "


class Qwen3XmlToolParser(CallsInText):
    """Calls with a tag for each parameter."""

    BEGINS = (_CALL, _FUNCTION)
    END = _CALL_END
    SPECIAL_TAGS = True

    def __init__(self, tools: Iterable[ToolParam] = ()) -> None:
        super().__init__()
        self._types = parameter_types(tools)

    @classmethod
    def for_tools(cls, tools: Iterable[ToolParam]) -> Self:
        """A parser for an answer to a request with these tools."""
        return cls(tools)

    def reader(self, begin: str) -> tuple[Reader, str]:
        """As `CallsInText.reader`."""
        return FunctionCall(begin, self.tell, self._types), ""
