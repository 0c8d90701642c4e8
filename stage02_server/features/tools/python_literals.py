"""Values that a model writes in Python, `{'a': [1, None]}`, as JSON, while they arrive.

Brackets, commas and quotes are followed here, with a stack; `ast.literal_eval` sees only single numbers and escapes. So nothing is
ever executed, no depth of nesting meets Python's own parser, and each character is looked at once.
"""

from __future__ import annotations

import ast
import json
import math

from stage02_server.features.tools.call_scanner import unicode_text

MAX_DEPTH = 128
MAX_WORD = 128  # characters of a number, a name or an escape
_CLOSES = {")": "(", "]": "[", "}": "{"}
_NAMED = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_OCTAL = "01234567"
_CODES = {"x": 4, "u": 6, "U": 10}  # escape -> its characters, the backslash included


class NotPython(ValueError):
    """The text is no value."""


class PythonString:
    """A string from its first quote on, as JSON. `done`: the quote that ends it was taken; `over`: it had ended before the last character."""

    def __init__(self, quote: str) -> None:
        self.done = self.over = False
        self._quote, self._quotes = quote, 1  # quotes in a row
        self._begun = self._is_triple = False
        self._escape = ""

    def take(self, char: str) -> str:
        """The next character; returns what it adds to the JSON. Raises NotPython."""
        if not self._begun:
            return self._begin(char)
        if self._escape:
            return self._read_escape(char)
        if char == self._quote:
            self._quotes += 1
            self.done = self._quotes == (3 if self._is_triple else 1)
            return '"' if self.done else ""
        text, self._quotes = self._quote * self._quotes, 0
        if char == "\\":
            self._escape = char
        elif char == "\n" and not self._is_triple:
            raise NotPython
        else:
            text += char
        return _quoted(text)

    def _begin(self, char: str) -> str:
        """One quote, two or three?"""
        if char == self._quote and self._quotes < 3:
            self._quotes += 1
            self._begun = self._is_triple = self._quotes == 3
            self._quotes *= not self._begun
            return '"' if self._begun else ""
        if self._quotes == 2:
            self.done = self.over = True
            return '""'
        self._begun, self._quotes = True, 0
        return '"' + self.take(char)

    def _read_escape(self, char: str) -> str:
        if self._escape[1:2] in tuple(_OCTAL):  # up to three digits
            if char in _OCTAL and len(self._escape) < 4:
                self._escape += char
                return ""
            text, self._escape = chr(int(self._escape[1:], 8)), ""
            return _quoted(text) + self.take(char)
        if self._escape == "\\" and char in _ESCAPES:
            self._escape = ""
            return _quoted(_ESCAPES[char])
        self._escape += char
        kind = self._escape[1]
        if kind in _OCTAL:
            return ""
        if kind not in "xuUN":  # Python keeps an escape that it does not know: a pattern's \\d
            text, self._escape = self._escape, ""
            return _quoted(unicode_text(text))
        if len(self._escape) > MAX_WORD:
            raise NotPython
        if len(self._escape) < _CODES.get(kind, MAX_WORD) and char != "}":
            return ""
        try:
            text = str(ast.literal_eval(f'"{self._escape}"'))
        except (ValueError, SyntaxError):
            raise NotPython from None
        self._escape = ""
        return _quoted(unicode_text(text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _atom(word: str) -> str:
    """A number or a name as JSON. Raises NotPython."""
    if word in _NAMED:
        return _NAMED[word]
    try:
        if any(char.isalpha() and char not in "eExXoObBaAcCdDfF" for char in word):
            raise NotPython  # also what Python would warn of, as 1if
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        raise NotPython from None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise NotPython
    return json.dumps(value)


class PythonTranslator:
    """From Python to JSON. `call`: the text is the arguments of a call from behind its bracket, `a=1, b='x')`, and becomes an object.
    `done`: the value is complete."""

    def __init__(self, call: bool = False) -> None:
        self.done = False
        self._open = ["("] if call else []  # brackets
        self._expects = (
            "item" if call else "value"
        )  # item: what a bracket or a comma is followed by. Or value, equals, colon, comma
        self._word = ""
        self._string: PythonString | None = None
        self._before = "{" if call else ""  # the next output begins with this
        self._comma = False

    def take(self, char: str) -> str:
        """The next character; returns what it adds to the JSON. Raises NotPython."""
        if self._string is not None:
            return self._read_string(self._string, char)
        if char.isalnum() or char in "_.+-":
            self._word += char
            if len(self._word) > MAX_WORD:
                raise NotPython
            return ""
        ended = self._end_word() if self._word else ""
        return ended if char.isspace() else ended + self._read_mark(char)

    def _read_string(self, string: PythonString, char: str) -> str:
        text = string.take(char)
        if string.done:
            self._string, self.done = None, not self._open
        text = self._written(text) if text else ""
        return text + self.take(char) if string.over else text

    def _end_word(self) -> str:
        word, self._word = self._word, ""
        if self._expects == "item" and self._open[-1] == "(":
            if not word.isidentifier():
                raise NotPython
            self._before += json.dumps(word, ensure_ascii=False) + ": "
            self._expects = "equals"
            return ""
        is_key = self._begin_value()
        atom = _atom(word)
        return self._written(f'"{atom}"' if is_key else atom)

    def _begin_value(self) -> bool:
        """A value, or a key of a dict, may begin here. Returns whether it is a key."""
        if self._expects not in ("item", "value") or (self._expects == "item" and self._open[-1] == "("):
            raise NotPython
        is_key = self._expects == "item" and self._open[-1] == "{"
        self._expects = "colon" if is_key else "comma"
        self.done = not self._open
        return is_key

    def _read_mark(self, mark: str) -> str:
        if mark in "'\"":
            self._begin_value()
            self._string, self.done = PythonString(mark), False
            return ""
        if mark in "[{":
            return self._begin_container(mark)
        if mark in _CLOSES and self._open and self._open[-1] == _CLOSES[mark] and self._expects in ("item", "comma"):
            return self._end_container()
        if mark == "," and self._open and self._expects == "comma":
            self._expects, self._comma = "item", True
            return ""
        if (mark, self._expects) not in (("=", "equals"), (":", "colon")):
            raise NotPython
        self._expects = "value"
        return ": " if mark == ":" else ""

    def _begin_container(self, bracket: str) -> str:
        if self._begin_value() or len(self._open) == MAX_DEPTH:
            raise NotPython
        self._open.append(bracket)
        self._expects, self.done = "item", False
        return self._written(bracket)

    def _end_container(self) -> str:
        bracket = self._open.pop()
        self._comma = False
        self._expects, self.done = "comma", not self._open
        return self._written("]" if bracket == "[" else "}")

    def _written(self, text: str) -> str:
        before, self._before = ", " * self._comma + self._before, ""
        self._comma = False
        return before + text


def python_json(text: str) -> str | None:
    """The value as JSON; None if it is none."""
    translator = PythonTranslator()
    try:
        found = "".join([translator.take(char) for char in text + "\n"])
    except NotPython:
        return None
    return found if translator.done else None
