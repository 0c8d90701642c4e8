"""Calls as Llama 3.2, Llama 4 and ToolACE write them, in Python (vllm/tool_parsers/pythonic_tool_parser.py).

    text [f(a=1, b=['x', None]), g()] text

In vLLM such a list must be the whole answer.
"""

from __future__ import annotations

from stage02_server.features.tools.calls_in_text import MAX_NAME, CallsInText, Reader, Tell
from stage02_server.features.tools.python_literals import NotPython, PythonTranslator


class CallList(Reader):
    """`[f(a=1), g()]`. A call is told with its first value, or when it ends without one. A value that is none ends the list: if its call
    is told, the arguments stay incomplete; the rest is content."""

    def __init__(self, begin: str, tell: Tell) -> None:
        super().__init__(begin, tell)
        self._name = ""
        self._call: PythonTranslator | None = None
        self._num_calls = 0
        self._is_between = False  # after a call: a comma follows, or the end

    def read(self, text: str, finished: bool) -> str:
        """As `Reader.read`."""
        place = 0
        while place < len(text) and not self.done:
            try:
                self._take(text[place])
            except NotPython:
                return self.end(text[place:])
            place += 1
        return text[place:]

    def _take(self, char: str) -> None:
        if self._call is not None:
            self._read_arguments(self._call, char)
        elif char == "]" and self._num_calls and not self._name:
            self.done = True
        elif char.isspace() and not self._name:
            self._note(char)
        elif self._is_between:
            self._read_comma(char)
        else:
            self._read_name(char)

    def _read_arguments(self, call: PythonTranslator, char: str) -> None:
        arguments = call.take(char)
        if arguments:
            self.tell(self._name or None, arguments)
            self._name = ""
        else:
            self._untold.append(char)
        if call.done:
            self._call, self._is_between = None, True
            self._num_calls += 1

    def _read_comma(self, char: str) -> None:
        if char != ",":
            raise NotPython
        self._is_between = False
        self._note(char)

    def _read_name(self, char: str) -> None:
        if char == "(" and self._name.isidentifier():
            self._call = PythonTranslator(call=True)
        elif (char.isalnum() or char == "_") and len(self._name) < MAX_NAME:
            self._name += char
        else:
            raise NotPython
        self._untold.append(char)

    def _note(self, char: str) -> None:
        """A character between calls is content only if none was told before it."""
        if self._untold:
            self._untold.append(char)


class PythonicToolParser(CallsInText):
    """Calls in Python."""

    BEGINS = ("[",)

    def reader(self, begin: str) -> tuple[Reader, str]:
        """As `CallsInText.reader`."""
        return CallList(begin, self.tell), ""
