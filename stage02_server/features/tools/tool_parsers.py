"""Tool calls in the text of an answer (vllm/tool_parsers).

A parser of your own: `--tool-parser-plugin my_parser.py`, a file that puts its class into TOOL_PARSERS.
"""

from __future__ import annotations

from stage02_server.call_scanner import CallScanner
from stage02_server.features.tools.answer_parser import AnswerDelta, split_held_back

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesToolParser:
    """`text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text`, as Hermes and Qwen write calls.

    What stands between the tags and is no call stays content, tags and all. The text that waits is in `_held`.
    """

    def __init__(self) -> None:
        self._held = ""
        self._call: CallScanner | None = None
        self._num_calls = 0
        self._closing = False  # behind a call: its end tag and white space are no content

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
    """`[{"name": "f", "parameters": {...}}, ...]`, which the grammar of tool_choice "required" lets come."""

    def __init__(self) -> None:
        self._call: CallScanner | None = None
        self._num_calls = 0
        self._is_text = False  # no grammar held, as with the echo engine

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
