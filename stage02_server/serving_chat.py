"""POST /v1/chat/completions (vllm/entrypoints/openai/chat_completion/serving.py, OpenAIServingChat)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from stage02_server.protocol import ChatCompletionRequest
from stage02_server.protocol_response import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletionResponse,
    ChatMessage,
    ChatStreamResponse,
)
from stage02_server.serving_engine import AnswerMaker, EngineRequests, OpenAIServing, Result
from stage02_server.streaming import run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stage03_engine.mixins import load
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace

if TYPE_CHECKING:
    from stage02_server.api_server import Services


class Answer(Protocol):
    """One answer as it arrives: a feature may split its text into content, reasoning and tool calls."""

    def delta(self, output: CompletionOutput) -> dict[str, Any]:
        """What a piece of output adds, as the `delta` of a chunk; empty if it is held back."""

    def message(self, output: CompletionOutput) -> dict[str, Any]:
        """A whole answer as fields of `ChatMessage`."""

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """Why the answer ended, or None; of the output that `delta` or `message` was asked about last."""


class PlainAnswer:
    """All of the text is content."""

    def delta(self, output: CompletionOutput) -> dict[str, Any]:
        """As `Answer.delta`."""
        return {"content": output.text}

    message = delta

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """As `Answer.finish_reason`."""
        return output.finish_reason


class ChatMaker(AnswerMaker):
    """Engine outputs as choices of a chat. The first chunk of each streamed answer has the role."""

    whole_class, last_class = ChatCompletionResponse, ChatStreamResponse
    chunk_class = ChatChunk

    def __init__(self, requests: EngineRequests, role: str, new_answer: Callable[[], Answer]) -> None:
        super().__init__(requests)
        self._role, self._new_answer = role, new_answer
        self._answers: dict[int, Answer] = {}

    def choice(self, index: int, output: CompletionOutput) -> ChatChoice:
        """The whole answer `index`."""
        answer = self._new_answer()
        message = ChatMessage(role=self._role, **answer.message(output))
        reason, stop = answer.finish_reason(output), output.stop_reason
        choice = ChatChoice(index=index, message=message, finish_reason=reason, stop_reason=stop)
        self.add_features(index, choice, output)
        return choice

    def pieces(self, index: int, output: CompletionOutput) -> list[Any]:
        """One chunk, after one with the role if this is the answer's first; nothing if the text is held back."""
        if index not in self._answers:
            self._answers[index] = self._new_answer()
            role = ChatChunkChoice(index=index, delta={"role": self._role, "content": ""})
            return [role, *self.pieces(index, output)]
        answer = self._answers[index]
        piece = ChatChunkChoice(index=index, delta=answer.delta(output))
        if output.finish_reason is not None:
            piece.finish_reason, piece.stop_reason = answer.finish_reason(output), output.stop_reason
        if self.requests.hooks:
            self.add_features(index, piece, output)
        return [piece] if piece.delta or piece != ChatChunkChoice(index=index, delta={}) else []


def _renamed(error: InvalidRequestError, request: ChatCompletionRequest) -> InvalidRequestError:
    """The same refusal about the field that the client sent: a chat has no prompt, and max_tokens has two names."""
    if error.param == "max_tokens" and request.max_completion_tokens is not None:
        return type(error)(str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens")
    return type(error)(str(error), "messages" if error.param == "prompt" else error.param)


class OpenAIServingChat(OpenAIServing):
    """Answers chats."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._template = services.template
        self.parsers: Any = None  # the feature that parses answers, once a flag or a request asks for it

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Request) -> Result:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        try:
            return await self._create(request, raw_request)
        except InvalidRequestError as error:
            raise _renamed(error, request) from None

    async def _create(self, request: ChatCompletionRequest, raw_request: Request) -> Result:
        ids, model = self.ids(request, raw_request), self.check(request)
        self.trace_validated(request, ids, model, 1)
        params, receive = request.to_sampling_params(self.defaults), raw_request.receive
        parsers = self.parsers_for(request)
        shown = request if parsers is None else parsers.shown_to_template(request)
        if trace.on:
            kind = type(self.engine_client.tokenizer).__name__
            trace.emit("tokenizer.requested", req=ids.engine_id(0), tokenizer=kind)
        prompt = await run_until_disconnect(receive, self._template.apply(request.messages, shown))
        if trace.on:
            count = len(request.messages)
            trace.emit("request.templated", req=ids.engine_id(0), messages=count, characters=len(prompt))
        special = self._template.adds_special_tokens(request.add_special_tokens)
        requests = await self.tokenize(request, [prompt], params, ids, model, receive, special)
        new_answer: Callable[[], Answer] = PlainAnswer
        if parsers is not None:
            new_answer = parsers.for_request(request, prompt, requests) or PlainAnswer
        maker = ChatMaker(requests, self.args.response_role, new_answer)
        return await self.answer(request, maker, self.ask(request, requests), raw_request)

    def parsers_for(self, request: ChatCompletionRequest) -> Any:
        """The feature that parses the answers; None if no flag and no field of the request asks for it. Raises
        InvalidRequestError if it cannot do what the request asks for."""
        for feature in request.used_features():
            if feature.parser_class and self.parsers is None:
                self.parsers = load(feature.parser_class)(self.args)
        if self.parsers is not None:
            self.parsers.check(request)
        return self.parsers
