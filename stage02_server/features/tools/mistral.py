"""Calls as Mistral's models write them (vllm/tool_parsers/mistral_tool_parser.py).

    text [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]    up to version 10 of its tokenizer
    text [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}                    from version 11; also f[ARGS]{...} and f[CALL_ID]id[ARGS]{...}

What follows the tag says which of the two it is. (vLLM asks the tokenizer.)
"""

from __future__ import annotations

from stage02_server.features.tools.call_scanner import Nesting
from stage02_server.features.tools.calls_in_text import MAX_NAME, CallsInText, JsonCalls, Reader, Tell

_MAX_HEAD = MAX_NAME + 64  # characters of a name and the marks behind it


class NamedCall(Reader):
    """`f{...}`: a name, and its arguments in JSON."""

    def __init__(self, begin: str, tell: Tell) -> None:
        super().__init__(begin, tell)
        self._head = ""
        self._arguments: Nesting | None = None

    def read(self, text: str, finished: bool) -> str:
        """As `Reader.read`."""
        if self._arguments is None:
            text = self._read_head(text)
        return text if self._arguments is None else self._read_arguments(self._arguments, text)

    def _read_head(self, text: str) -> str:
        """Up to the bracket that begins the arguments."""
        head, bracket, _ = text[: _MAX_HEAD + 1 - len(self._head)].partition("{")
        self._head += head
        self._untold.append(head)
        words = self._head.split()
        name, _, marks = words[0].partition("[") if words else ("", "", "")
        if bracket and name and len(words) == 1 and (not marks or marks.endswith("ARGS]")):
            self._arguments = Nesting()
            self.tell(name, "")
        elif bracket or len(self._head) > _MAX_HEAD:
            self.done = True
        return text[len(head) :]

    def _read_arguments(self, nesting: Nesting, text: str) -> str:
        place = 0
        while place < len(text) and not nesting.done:
            nesting.take(text[place])
            place += 1
        self.done = nesting.done
        if place:
            self.tell(None, text[:place])
        return text[place:]


class MistralCalls(Reader):
    """What follows the tag: a list, or one call."""

    def __init__(self, begin: str, tell: Tell) -> None:
        super().__init__(begin, tell)
        self._calls: Reader | None = None

    def read(self, text: str, finished: bool) -> str:
        """As `Reader.read`."""
        if self._calls is None:
            rest = text.lstrip()
            self._untold.append(text[: len(text) - len(rest)])
            if not rest:
                return ""
            self._calls = (JsonCalls if rest[0] == "[" else NamedCall)(self.rejected, self.tell)
            text = rest
        text = self._calls.read(text, finished)
        self.done = self._calls.done
        return text

    @property
    def rejected(self) -> str:
        """As `Reader.rejected`."""
        return super().rejected if self._calls is None else self._calls.rejected


class MistralToolParser(CallsInText):
    """Calls of Mistral's models."""

    BEGINS = ("[TOOL_CALLS]",)
    SPECIAL_TAGS = True

    def reader(self, begin: str) -> tuple[Reader, str]:
        """As `CallsInText.reader`."""
        return MistralCalls(begin, self.tell), ""
