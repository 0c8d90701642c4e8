"""The text of one answer, split into reasoning, content and tool calls as it arrives.

A whole answer takes the same path as a stream, in one piece, so the two cannot disagree. (In vLLM every parser has two
methods, extract_... and extract_..._streaming.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

MAX_PIECE = 1024
"""Characters that a parser gets at once: what it does with the rest of a piece must not grow with the answer."""


@dataclass
class CallDelta:
    """What is new in one tool call. Its name comes once, with its first piece."""

    name: str | None = None
    arguments: str = ""


@dataclass
class AnswerDelta:
    """What is new in an answer. `calls`: number of a tool call in its answer -> what is new in it."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, CallDelta] = field(default_factory=dict)

    def add_call(self, index: int, name: str | None, arguments: str) -> None:
        """Add more of call `index`."""
        call = self.calls.setdefault(index, CallDelta())
        call.name = name if call.name is None else call.name
        call.arguments += arguments

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


def joined(deltas: list[AnswerDelta]) -> AnswerDelta:
    """Several deltas as one. Each text is copied once, which adding them one by one would not do."""
    whole = AnswerDelta("".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas))
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        for index, call in delta.calls.items():
            whole.add_call(index, call.name, "")
            arguments.setdefault(index, []).append(call.arguments)
    for index, parts in arguments.items():
        whole.calls[index].arguments = "".join(parts)
    return whole


class Parser(Protocol):
    """Parses the text of one answer. Every answer has its own."""

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """The next piece of the text; what may still become a tag is held back until `finished`."""


def first_of(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """(where the first of the tags begins, this tag); (len(text), "") if there is none."""
    places = ((text.find(tag), tag) for tag in tags)
    return min((found for found in places if found[0] >= 0), default=(len(text), ""))


def split_held_back(text: str, *tags: str) -> tuple[str, str]:
    """(what can be passed on, the end of `text` that may be the beginning of a tag)."""
    longest = min(max(map(len, tags), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(tag.startswith(end) and tag != end for tag in tags):
            return text[:-length], end
    return text, ""


class AnswerParser:
    """Reasoning first, then tool calls in what remains. Either may be None. `num_characters` and `num_calls` count for the
    trace; the former counts reasoning."""

    def __init__(
        self, reasoning: Parser | None, tools: Parser | None, include_reasoning: bool = True, parallel: bool = True
    ) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._include_reasoning, self._parallel = include_reasoning, parallel
        self.num_characters = self.num_calls = 0

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """As `Parser.feed`; without what the request leaves out."""
        if len(text) <= MAX_PIECE:
            return self._feed(text, finished)
        last = (len(text) - 1) // MAX_PIECE
        pieces = [text[MAX_PIECE * number : MAX_PIECE * (number + 1)] for number in range(last + 1)]
        return joined([self._feed(piece, finished and number == last) for number, piece in enumerate(pieces)])

    def _feed(self, text: str, finished: bool) -> AnswerDelta:
        delta = AnswerDelta(content=text) if self._reasoning is None else self._reasoning.feed(text, finished)
        self.num_characters += len(delta.reasoning)
        reasoning = delta.reasoning if self._include_reasoning else ""
        if self._tools is not None:
            delta = self._tools.feed(delta.content, finished)
        calls = {index: call for index, call in delta.calls.items() if self._parallel or index == 0}
        self.num_calls = max([self.num_calls, *(index + 1 for index in calls)])
        return AnswerDelta(reasoning, delta.content, calls)
