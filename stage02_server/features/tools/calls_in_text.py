"""Content with calls in it: what the formats of all models have in common.

A format has tags that may begin a call (`BEGINS`). Up to there all is content; then a `Reader` takes the text until it has a call, or
several, or sees that there is none. In the latter case what it took is content after all. So a format is a reader, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from stage02_server.features.tools.answer_parser import AnswerDelta, first_of, split_held_back
from stage02_server.features.tools.call_scanner import CallScanner

MAX_NAME = 128
"""Characters in the name of a function: as many as a request may give it."""

Tell = Callable[[str | None, str], None]
"""Passes on what is new in a call: (its name, with which a call begins, or None; what this adds to the arguments)."""


class Reader(ABC):
    """Reads what follows a tag of `CallsInText.BEGINS`, until it is `done`."""

    def __init__(self, begin: str, tell: Tell) -> None:
        self.done = False
        self._tell_parser = tell
        self._untold = [begin]  # what was taken, and neither told as a call nor known to be mere punctuation

    @abstractmethod
    def read(self, text: str, finished: bool) -> str:
        """Take text; returns what is not taken, which is nothing while more can come."""

    @property
    def rejected(self) -> str:
        """What was taken and is no call, once it is done."""
        return "".join(self._untold)

    def tell(self, name: str | None, arguments: str) -> None:
        """As `Tell`."""
        self._untold.clear()
        self._tell_parser(name, arguments)

    def end(self, rest: str) -> str:
        """Take no more. Returns `rest`."""
        self.done = True
        return rest


class CallsInText(ABC):
    """A `Parser` for one format."""

    BEGINS: ClassVar[tuple[str, ...]]
    END: ClassVar[str] = ""
    """After a call, neither this nor white space is content."""
    SPECIAL_TAGS: ClassVar[bool] = False
    """Tokenizers may count the tags as special tokens, which the text leaves out unless it is told to keep them."""

    def __init__(self) -> None:
        self._held = ""  # what may become a tag
        self._reader: Reader | None = None
        self._num_calls = 0
        self._closing = False  # after a call
        self._delta = AnswerDelta()

    @abstractmethod
    def reader(self, begin: str) -> tuple[Reader, str]:
        """(the reader of what begins with this tag, what of the tag it has to read itself)."""

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """As `Parser.feed`."""
        delta = self._delta = AnswerDelta()
        text, self._held = self._held + text, ""
        while text or (finished and self._reader is not None):
            if self._reader is not None:
                text = self._read_calls(self._reader, text, finished)
            elif self._closing:
                text = self._read_end(text, finished)
            else:
                text = self._read_content(text, finished)
        return delta

    def tell(self, name: str | None, arguments: str) -> None:
        """As `Tell`."""
        self._num_calls += name is not None
        self._delta.add_call(self._num_calls - 1, name, arguments)

    def _read_content(self, text: str, finished: bool) -> str:
        """These three return what is left to read."""
        place, begin = first_of(text, self.BEGINS)
        if begin:
            self._reader, own = self.reader(begin)
            self._delta.content += text[:place]
            return own + text[place + len(begin) :]
        content, self._held = (text, "") if finished else split_held_back(text, *self.BEGINS)
        self._delta.content += content
        return ""

    def _read_calls(self, reader: Reader, text: str, finished: bool) -> str:
        num_calls = self._num_calls
        text = reader.read(text, finished)
        self._closing |= self._num_calls > num_calls
        if reader.done or finished:
            self._delta.content += reader.rejected
            self._closing &= not reader.rejected
            self._reader = None
        return text

    def _read_end(self, text: str, finished: bool) -> str:
        text = text.lstrip()
        if self.END and text.startswith(self.END):
            return text.removeprefix(self.END)
        if self.END.startswith(text) and not finished:
            self._held = text
            return ""
        self._closing = False
        return text


class JsonCall(Reader):
    """One call in JSON."""

    def __init__(self, begin: str, tell: Tell, lenient: bool = True) -> None:
        super().__init__(begin, tell)
        self._call = CallScanner(lenient)
        self.broken = False  # there is no call

    def read(self, text: str, finished: bool) -> str:
        """As `Reader.read`."""
        call, known = self._call, self._call.name
        arguments, text = call.feed(text)
        self.broken = call.broken or (finished and call.name is None)
        if self.broken:
            self._untold.append(call.raw)
            return self.end(text)
        if arguments or call.name != known:
            self.tell(call.name if known is None else None, arguments)
        self.done = call.done
        return text


class JsonCalls(Reader):
    """A list of calls in JSON, `[{...}, {...}]`."""

    def __init__(self, begin: str, tell: Tell) -> None:
        super().__init__(begin, tell)
        self._call: JsonCall | None = None

    def read(self, text: str, finished: bool) -> str:
        """As `Reader.read`."""
        while text and not self.done:
            if self._call is None:
                text = self._read_between(text)
            else:
                text = self._read_call(self._call, text, finished)
        if self._call is not None and finished:
            text = self._read_call(self._call, text, finished)
        return text

    def _read_call(self, call: JsonCall, text: str, finished: bool) -> str:
        text = call.read(text, finished)
        if call.done:
            self._call = None
        if call.broken:
            self._untold.append(call.rejected)
            self.done = True
        return text

    def _read_between(self, text: str) -> str:
        rest = text.lstrip("[, \t\r\n")
        if self._untold:  # no call yet
            self._untold.append(text[: len(text) - len(rest)])
        if rest.startswith("]"):
            return self.end(rest if self._untold else rest[1:])
        if rest:
            self._call = JsonCall("", self.tell)
        return rest
