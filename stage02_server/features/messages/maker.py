"""One message while it is made: engine outputs in, Anthropic's events out, in Anthropic's order
(vllm/entrypoints/anthropic/serving.py, message_stream_converter). A whole answer takes the same path, and its events are dropped.

    message_start, for each block (content_block_start, content_block_delta ..., content_block_stop), message_delta, message_stop
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from stage02_server.errors import unavailable
from stage02_server.features.messages.protocol_answer import (
    AnthropicMessagesResponse,
    AnthropicUsage,
    Block,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from stage02_server.features.tools.answer_parser import AnswerParser
from stage02_server.features.tools.pieces import Piece, pieces
from stage02_server.serving_engine import EngineRequests
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call. Text that is not a JSON object, or was cut, goes under the name that Anthropic's documentation gives it."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class MessageMaker:
    """`message` is whole once `end` was read."""

    def __init__(self, requests: EngineRequests, parser: AnswerParser | None) -> None:
        self._requests, self._parser = requests, parser
        self._open: tuple[str, int | None] | None = None  # the kind of the open block, and the number of its call
        self._texts: list[str] = []  # of the open block, which gets them when it ends
        self._last: CompletionOutput | None = None
        self.message = AnthropicMessagesResponse(
            id=requests.ids.response, model=requests.model, content=[], usage=self._usage()
        )

    def add(self, output: CompletionOutput) -> Iterator[bytes]:
        """What is new in an output of the engine. The first one tells how much of the prompt was in the prefix cache."""
        if self._last is None:
            self.message.usage = self._usage()
            usage = self.message.usage.model_dump() | {"output_tokens": 0}
            yield _event(
                "message_start", message=self.message.model_dump(exclude={"usage", "metrics"}) | {"usage": usage}
            )
        self._last = output
        for piece in self._pieces(output):
            yield from self._write(piece)

    def _pieces(self, output: CompletionOutput) -> list[Piece]:
        if self._parser is None:
            return [Piece("content", output.text)] if output.text else []
        found = pieces(self._parser, output.text, output.finish_reason is not None)
        if trace.on and output.finish_reason is not None:
            trace.emit(
                "answer.parsed", req=self._requests.ids.engine_id(0), index=0, tool_calls=self._parser.num_calls,
                reasoning_characters=self._parser.num_characters,
            )  # fmt: skip
        return found

    def _write(self, piece: Piece) -> Iterator[bytes]:
        if self._open != (piece.kind, piece.call):
            yield from self._close()
            yield from self._begin(piece)
        index, block = len(self.message.content) - 1, self.message.content[-1]
        self._texts.append(piece.text)
        if isinstance(block, TextBlock):
            delta = {"type": "text_delta", "text": piece.text}
        elif isinstance(block, ThinkingBlock):
            delta = {"type": "thinking_delta", "thinking": piece.text}
        else:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        if piece.text:
            yield _event("content_block_delta", index=index, delta=delta)

    def _begin(self, piece: Piece) -> Iterator[bytes]:
        block: Block = TextBlock()
        if piece.kind == "reasoning":
            block = ThinkingBlock()
        elif piece.kind == "call":
            block = ToolUseBlock(id=f"toolu_{uuid.uuid4().hex}", name=piece.name or "")
        self._open = (piece.kind, piece.call)
        self.message.content.append(block)
        yield _event("content_block_start", index=len(self.message.content) - 1, content_block=block.model_dump())

    def _close(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        if self._open is None:
            return
        index, block = len(self.message.content) - 1, self.message.content[-1]
        text, self._texts = "".join(self._texts), []
        if isinstance(block, ToolUseBlock):
            block.input = arguments_of(text)
        elif isinstance(block, TextBlock):
            block.text = text
        else:
            block.thinking = text
            block.signature = uuid.uuid4().hex
            delta = {"type": "signature_delta", "signature": block.signature}
            yield _event("content_block_delta", index=index, delta=delta)
        self._open = None
        yield _event("content_block_stop", index=index)

    def end(self) -> Iterator[bytes]:
        """Everything after the last text. Raises APIError for an answer that was aborted."""
        assert self._last is not None
        if self._last.finish_reason == "abort":
            raise unavailable("The request was aborted.")
        yield from self._close()
        message = self.message
        message.stop_reason, message.stop_sequence = self._stop(self._last)
        message.usage = self._usage()
        for hook in self._requests.hooks:
            hook.response(message)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield _event("message_delta", delta=delta, usage=message.usage.model_dump())
        yield _event("message_stop")

    def _stop(self, output: CompletionOutput) -> tuple[StopReason, str | None]:
        if output.finish_reason == "length":
            return "max_tokens", None
        if any(isinstance(block, ToolUseBlock) for block in self.message.content):
            return "tool_use", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return "end_turn", None

    def _usage(self) -> AnthropicUsage:
        usage = self._requests.usage()
        cached = self._requests.num_cached_tokens  # 0 without --enable-prompt-tokens-details
        return AnthropicUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )
