"""The items of a response's output while they are written, as OpenAI's events (vllm/entrypoints/openai/responses/
streaming_events.py). One item is open at a time, and its place in `output` is the events' `output_index`:

    output_item.added, (content_part.added,) delta ..., done, (content_part.done,) output_item.done
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from stage02_server.features.logprobs.fields import ChatLogProb, TokenLogProb
from stage02_server.features.responses.protocol_output import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from stage02_server.features.tools.pieces import Piece

Event = tuple[str, dict[str, Any]]  # the type of an event without "response.", and its fields


def without_bytes(logprobs: list[ChatLogProb]) -> list[dict[str, Any]]:
    """The shorter form that the text events have."""
    return [_plain(entry) | {"top_logprobs": [_plain(other) for other in entry.top_logprobs]} for entry in logprobs]


def _plain(entry: TokenLogProb) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob}


class OutputItems:
    """`items` are those that were begun; the last one may be open. Every method yields its events."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._call: int | None = None  # the number of the open tool call
        self._part: OutputText | ReasoningText | None = None  # of the open message or reasoning
        self._texts: list[str] = []  # of the open item, which gets them when it ends

    @property
    def in_message(self) -> bool:
        """True while a message is open."""
        return isinstance(self._part, OutputText)

    def write(self, piece: Piece, logprobs: list[ChatLogProb]) -> Iterator[Event]:
        """More text, with its logprobs if it belongs to a message."""
        if not self._is_open_for(piece):
            yield from self.close("completed")
            yield from self._open(piece)
        item = self.items[-1]
        self._texts.append(piece.text)
        if isinstance(item, FunctionCallItem):
            if piece.text:
                yield self._event("function_call_arguments.delta", item_id=item.id, delta=piece.text)
            return
        assert self._part is not None
        more: dict[str, Any] = {"delta": piece.text}
        if isinstance(self._part, OutputText):
            self._part.logprobs += logprobs
            more["logprobs"] = without_bytes(logprobs)
        if piece.text or logprobs:  # a token may be a part of a character
            yield self._event(f"{self._part.type}.delta", item_id=item.id, content_index=0, **more)

    def close(self, status: ItemStatus) -> Iterator[Event]:
        """End the open item, if there is one."""
        item = self.items[-1] if self.items else None
        if item is None or item.status != "in_progress":
            return
        item.status = status
        text, self._texts = "".join(self._texts), []
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            done = {"name": item.name, "arguments": item.arguments}
            yield self._event("function_call_arguments.done", item_id=item.id, **done)
        elif (part := self._part) is not None:
            part.text = text
            more = {"logprobs": without_bytes(part.logprobs)} if isinstance(part, OutputText) else {}
            where = {"item_id": item.id, "content_index": 0}
            yield self._event(f"{part.type}.done", **where, text=part.text, **more)
            yield self._event("content_part.done", **where, part=part)
            item.content = [part]  # type: ignore[assignment]  # each kind of item has its own kind of part
        self._call = self._part = None
        yield self._event("output_item.done", item=item)

    def _is_open_for(self, piece: Piece) -> bool:
        if piece.kind == "call":
            return self._call is not None and self._call == piece.call
        return isinstance(self._part, OutputText if piece.kind == "content" else ReasoningText)

    def _open(self, piece: Piece) -> Iterator[Event]:
        if piece.kind == "call":
            self._call = piece.call
            item: OutputItem = FunctionCallItem(id=_new_id("fc"), call_id=_new_id("call"), name=piece.name or "")
        elif piece.kind == "content":
            item, self._part = OutputMessage(id=_new_id("msg")), OutputText()
        else:
            item, self._part = ReasoningItem(id=_new_id("rs")), ReasoningText()
        self.items.append(item)
        yield self._event("output_item.added", item=item)
        if self._part is not None:
            yield self._event("content_part.added", item_id=item.id, content_index=0, part=self._part)

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"output_index": len(self.items) - 1} | fields


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
