"""An answer as pieces in their order, for the APIs whose answers are lists of items: Responses and Messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stage02_server.features.tools.answer_parser import AnswerDelta, AnswerParser

_STEP = re.compile(r"[\w\s]+|.", re.DOTALL)


@dataclass
class Piece:
    """A piece of an answer that belongs to one item. `call` is the number of a tool call, whose first piece has the name."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: int | None = None
    name: str | None = None


def _pieces_of(delta: AnswerDelta) -> Iterator[Piece]:
    if delta.reasoning:
        yield Piece("reasoning", delta.reasoning)
    if delta.content:
        yield Piece("content", delta.content)
    for number, call in delta.calls.items():
        yield Piece("call", call.arguments, number, call.name)


def pieces(parser: AnswerParser, text: str, finished: bool) -> list[Piece]:
    """The next text of an answer as pieces in their order.

    A delta of the parser does not say which came first, content or a call. So the parser gets the text in steps: words, and
    every other character but spaces by itself. Then the items are the same, in the same order, however the text was cut, and for a
    whole answer too.
    """
    found: list[tuple[Piece, list[str]]] = []  # and its texts
    steps = [parser.feed(step, False) for step in _STEP.findall(text)]
    for delta in [*steps, parser.feed("", True)] if finished else steps:
        for piece in _pieces_of(delta):
            if found and (found[-1][0].kind, found[-1][0].call) == (piece.kind, piece.call):
                found[-1][1].append(piece.text)
            else:
                found.append((piece, [piece.text]))
    for piece, texts in found:
        piece.text = "".join(texts)
    return [piece for piece, _ in found]
