"""One response while it is made: engine outputs in, OpenAI's events out, in OpenAI's order
(vllm/entrypoints/openai/responses/streaming_events.py).

    created, (queued,) in_progress, (what items.py says, for each item), completed | incomplete | failed
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from stage02_server.errors import as_api_error, unavailable
from stage02_server.features.logprobs.answer import ChatLogprobsWriter
from stage02_server.features.logprobs.fields import ChatLogProb
from stage02_server.features.responses.encoded import EncodedResponse, encoded_items, object_of, to_bytes
from stage02_server.features.responses.items import Event, OutputItems
from stage02_server.features.responses.protocol import InputItem, ResponsesRequest
from stage02_server.features.responses.protocol_output import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputTokensDetails,
    ResponseError,
    ResponseProgress,
    ResponsesResponse,
    ResponseUsage,
)
from stage02_server.features.tools.answer_parser import AnswerParser
from stage02_server.features.tools.pieces import Piece, pieces
from stage02_server.serving_engine import EngineRequests
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


def _new_response(request: ResponsesRequest, requests: EngineRequests, store: bool) -> ResponsesResponse:
    params = requests.engine_requests[0].sampling_params
    asked, choice = request.text and request.text.format, request.tool_choice or "auto"
    return ResponsesResponse(
        id=requests.ids.response,
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=requests.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning.model_dump(exclude={"generate_summary"}) if request.reasoning else None,
        store=store,
        temperature=params.temperature,
        text={"format": asked.model_dump(by_alias=True, exclude_none=True) if asked else {"type": "text"}},
        tool_choice=choice.model_dump(exclude_none=True) if isinstance(choice, BaseModel) else choice,
        tools=[tool.model_dump() for tool in request.tools or []],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


class ResponseMaker:
    """`progress` is always up to date, as a client may see it."""

    def __init__(
        self,
        request: ResponsesRequest,
        requests: EngineRequests,
        tokenizer: Tokenizer,
        store: bool,
        parser: AnswerParser | None,
    ) -> None:
        response = _new_response(request, requests, store)
        self.encoded = EncodedResponse(response)
        self.progress = ResponseProgress(id=response.id, status=response.status)
        self._requests, self._tokenizer, self._parser = requests, tokenizer, parser
        self._include_reasoning = request.include_reasoning
        self._output = OutputItems()
        self._reasoning: list[str] = []
        self._logprobs_writer = ChatLogprobsWriter(tokenizer)
        self._logprobs: list[ChatLogProb] = []  # of tokens that no message has had yet
        self._finish_reason: str | None = None
        self._num_events = 0
        self.cut_event = b""  # what `cut` made

    @property
    def whole(self) -> bytes:
        """The response as it is now, as JSON."""
        return self.encoded.whole(self.progress)

    def items(self) -> list[bytes]:
        """The output as JSON, as the next response of the conversation sees it."""
        return encoded_items([InputItem.model_validate(item.model_dump()) for item in self._output.items])

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._encoded_event(kind, {name: to_bytes(value) for name, value in fields.items()})

    def _response_event(self, kind: str) -> bytes:
        return self._encoded_event(kind, {"response": self.whole})

    def _encoded_event(self, kind: str, fields: dict[str, bytes]) -> bytes:
        name = f"response.{kind}"
        event = {"type": to_bytes(name), "sequence_number": b"%d" % self._num_events} | fields
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), object_of(event))

    def _told(self, events: Iterable[Event]) -> Iterator[bytes]:
        for kind, fields in events:
            yield self._event(kind, **fields)

    def begin(self) -> Iterator[bytes]:
        """Everything before the first text."""
        yield self._response_event("created")
        if self.progress.status == "queued":
            yield self._response_event("queued")
        self.progress.status = "in_progress"
        yield self._response_event("in_progress")

    def add(self, output: CompletionOutput) -> Iterator[bytes]:
        """What is new in an output of the engine."""
        self._logprobs += self._logprobs_writer.write(output.logprobs or [])
        self._finish_reason = output.finish_reason
        for piece in self._pieces(output):
            if piece.kind == "reasoning":
                self._reasoning.append(piece.text)
                if not self._include_reasoning:
                    continue
            yield from self._told(self._output.write(piece, self._taken_logprobs(piece)))

    def _pieces(self, output: CompletionOutput) -> list[Piece]:
        """Logprobs without text go with the message that is being written, or else with the next one."""
        found = [Piece("content", output.text)] if output.text else []
        if self._parser is not None:
            found = pieces(self._parser, output.text, output.finish_reason is not None)
            self._trace_end(output)
        if self._logprobs and not found and (self._parser is None or self._output.in_message):
            return [Piece("content", "")]
        return found

    def _taken_logprobs(self, piece: Piece) -> list[ChatLogProb]:
        taken: list[ChatLogProb] = []
        if piece.kind == "content":
            taken, self._logprobs = self._logprobs, []
        return taken

    def _trace_end(self, output: CompletionOutput) -> None:
        if trace.on and output.finish_reason is not None and self._parser is not None:
            trace.emit(
                "answer.parsed", req=self._requests.ids.engine_id(0), index=0, tool_calls=self._parser.num_calls,
                reasoning_characters=self._parser.num_characters,
            )  # fmt: skip

    def end(self) -> Iterator[bytes]:
        """Everything after the last text. An empty answer becomes an empty message."""
        if self._finish_reason == "abort":
            yield self.fail(unavailable("The request was aborted."))
            return
        complete = self._finish_reason != "length"
        if not self._output.items:
            yield from self._told(self._output.write(Piece("content", ""), []))
        status: ItemStatus = "completed" if complete else "incomplete"
        yield from self._told(self._output.close(status))
        # Another thread may read the one that is there.
        ended = ResponseProgress(id=self.progress.id, status=status, output=self._output.items, usage=self._usage())
        if complete:
            ended.completed_at = int(time.time())
        else:
            ended.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        for hook in self._requests.hooks:
            hook.response(ended)
        self.progress = ended
        yield self._response_event(status)

    def fail(self, error: Exception) -> bytes:
        """The last event of a response that an error ended."""
        refusal = as_api_error(error)
        code = "invalid_prompt" if refusal.status == 400 else "server_error"
        self.progress.status = "failed"
        self.progress.error = ResponseError(code=code, message=refusal.message)
        return self._response_event("failed")

    def cut(self, error: Exception) -> bytes:
        """The last event of a stream that the end of the server cuts, the same for all who read it; nothing if the response had its
        last event before."""
        if self.progress.status in ("queued", "in_progress"):
            self.cut_event = self.fail(error)
        return self.cut_event

    def _usage(self) -> ResponseUsage:
        usage = self._requests.usage()
        thought = "".join(self._reasoning)
        reasoning = len(self._tokenizer.encode(thought, add_special_tokens=False)) if thought else 0
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=self._requests.num_cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=min(reasoning, usage.completion_tokens)),
            total_tokens=usage.total_tokens,
        )
