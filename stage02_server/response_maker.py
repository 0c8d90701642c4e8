"""One response while it is made: engine outputs in, OpenAI's events out, in OpenAI's order
(vllm/entrypoints/openai/responses/streaming_events.py).

    created, (queued,) in_progress, output_item.added, content_part.added, output_text.delta ...,
    output_text.done, content_part.done, output_item.done, completed | incomplete | failed
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from stage02_server.errors import as_api_error
from stage02_server.protocol_response import ChatLogProb, TokenLogProb
from stage02_server.protocol_responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from stage02_server.serving_engine import Batch, finite
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stage03_engine.outputs import CompletionOutput


def _logprobs(positions: list[TokenLogprobs], tokenizer: Tokenizer) -> list[ChatLogProb]:
    """A position holds the sampled token first, then the most likely ones."""
    result = []
    for position in positions:
        shown = [
            TokenLogProb(token=tokenizer.token_text(i), logprob=finite(logprob), bytes=list(tokenizer.token_bytes(i)))
            for i, logprob in zip(position.token_ids, position.logprobs, strict=True)
        ]
        result.append(ChatLogProb(**shown[0].model_dump(), top_logprobs=shown[1:]))
    return result


def _without_bytes(logprobs: list[ChatLogProb]) -> list[dict[str, Any]]:
    """The shorter form that the text events have."""
    hidden: Any = {"bytes": True, "top_logprobs": {"__all__": {"bytes"}}}
    return [entry.model_dump(exclude=hidden) for entry in logprobs]


def _new_response(request: ResponsesRequest, batch: Batch, store: bool) -> ResponsesResponse:
    params = batch.requests[0].sampling_params
    asked = request.text and request.text.format
    return ResponsesResponse(
        id=batch.ids.response,
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=batch.model,
        previous_response_id=request.previous_response_id,
        store=store,
        temperature=params.temperature,
        text={"format": asked.model_dump(by_alias=True, exclude_none=True) if asked else {"type": "text"}},
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


class ResponseMaker:
    """`response` is always what a client may be told about the response at this moment."""

    def __init__(self, request: ResponsesRequest, batch: Batch, tokenizer: Tokenizer, store: bool) -> None:
        self.response = _new_response(request, batch, store)
        self._batch, self._tokenizer = batch, tokenizer
        self._item = OutputMessage(id=f"msg_{uuid.uuid4().hex}")
        self._part = OutputText()
        self._finish_reason: str | None = None
        self._num_events = 0
        self._num_tokens = 0

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._part.text

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": f"response.{kind}", "sequence_number": self._num_events}
        for name, value in fields.items():
            event[name] = value.model_dump() if isinstance(value, BaseModel) else value
        self._num_events += 1
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item.id, output_index=0, content_index=0, **fields)

    def begin(self) -> Iterator[bytes]:
        """Everything before the first text."""
        yield self._event("created", response=self.response)
        if self.response.status == "queued":
            yield self._event("queued", response=self.response)
        self.response.status = "in_progress"
        yield self._event("in_progress", response=self.response)
        yield self._event("output_item.added", output_index=0, item=self._item)
        yield self._text_event("content_part.added", part=self._part)

    def add(self, output: CompletionOutput) -> Iterator[bytes]:
        """What is new in an output of the engine."""
        logprobs = _logprobs(output.logprobs or [], self._tokenizer)
        self._part.text += output.text
        self._part.logprobs += logprobs
        self._num_tokens += len(output.token_ids)
        self._finish_reason = output.finish_reason
        if output.text or logprobs:  # a token may be a part of a character
            yield self._text_event("output_text.delta", delta=output.text, logprobs=_without_bytes(logprobs))

    def end(self) -> Iterator[bytes]:
        """Everything behind the last text."""
        if self._finish_reason == "abort":
            yield self.fail(RuntimeError("The request was aborted."))
            return
        complete = self._finish_reason != "length"
        self._item.status = "completed" if complete else "incomplete"
        yield self._text_event("output_text.done", text=self.text, logprobs=_without_bytes(self._part.logprobs))
        yield self._text_event("content_part.done", part=self._part)
        self._item.content = [self._part]
        yield self._event("output_item.done", output_index=0, item=self._item)
        self.response.status = self._item.status
        if complete:
            self.response.completed_at = int(time.time())
        else:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        self.response.output = [self._item]
        self.response.usage = self._usage()
        yield self._event(self.response.status, response=self.response)

    def fail(self, error: Exception) -> bytes:
        """The last event of a response that an error ended."""
        refusal = as_api_error(error)
        code = "invalid_prompt" if refusal.status == 400 else "server_error"
        self.response.status = "failed"
        self.response.error = ResponseError(code=code, message=refusal.message)
        return self._event("failed", response=self.response)

    def _usage(self) -> ResponseUsage:
        usage = self._batch.usage([self._num_tokens])
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )
