"""POST /v1/chat/completions (vllm/entrypoints/openai/serving_chat.py, OpenAIServingChat)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from stage02_server.chat_template import ChatTemplate, text_of
from stage02_server.cli_args import FrontendArgs
from stage02_server.logprobs import chat_logprobs
from stage02_server.protocol import ChatCompletionRequest
from stage02_server.protocol_response import (
    ChatChoice,
    ChatCompletionResponse,
    ChatLogProbs,
    ChatMessage,
    ChatStreamChoice,
    ChatStreamResponse,
    UsageInfo,
)
from stage02_server.routes import OpenAIServingModels
from stage02_server.serving_engine import EngineRequests, OpenAIServing
from stage02_server.streaming import run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.mixins import load
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


class Answer(Protocol):
    """One answer while it comes: a feature may take its text apart into content, reasoning and tool calls."""

    def delta(self, output: CompletionOutput) -> dict[str, Any]:
        """What a piece of output adds, as the `delta` of a chunk; empty if it is held back."""

    def message(self, output: CompletionOutput) -> dict[str, Any]:
        """A whole answer as fields of `ChatMessage`."""

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """Why the answer ended, or None."""


class PlainAnswer:
    """All of the text is content."""

    def delta(self, output: CompletionOutput) -> dict[str, Any]:
        """As `Answer.delta`."""
        return {"content": output.text}

    message = delta

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """As `Answer.finish_reason`."""
        return output.finish_reason


@dataclass
class ChatContext:
    """What the answers to one chat have in common."""

    requests: EngineRequests
    tokenizer: Tokenizer
    role: str
    echoed: str  # the text with which each answer begins
    prompt_text: str | None  # if the client asked for it
    new_answer: Callable[[], Answer]

    def logprobs(self, output: CompletionOutput) -> ChatLogProbs | None:
        """None if nobody asked."""
        if output.logprobs is None:
            return None
        return ChatLogProbs(content=chat_logprobs(output.logprobs, self.tokenizer, self.requests.tokens_as_ids))

    def token_ids(self, output: CompletionOutput) -> list[int] | None:
        """None if nobody asked."""
        return output.token_ids if self.requests.return_token_ids else None


class ChatChunks:
    """Engine outputs as chunks of a chat stream. The first chunk of each answer says who speaks."""

    def __init__(self, chat: ChatContext) -> None:
        self._chat, self._requests = chat, chat.requests
        self._created = int(time.time())
        self._answers: dict[int, Answer] = {}

    def _chunk(self, choices: list[ChatStreamChoice], usage: UsageInfo | None = None) -> ChatStreamResponse:
        return ChatStreamResponse(
            id=self._requests.ids.response,
            created=self._created,
            model=self._requests.model,
            choices=choices,
            usage=usage,
        )

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[ChatStreamResponse]:
        """One chunk, and before it the role if this is the answer's first. None for what is held back."""
        if index not in self._answers:
            self._answers[index] = self._chat.new_answer()
            first = {"role": self._chat.role, "content": self._chat.echoed}
            begin = self._chunk([ChatStreamChoice(index=index, delta=first)])
            begin.prompt_token_ids, begin.prompt_text = self._requests.shown_prompt_ids(index), self._chat.prompt_text
            yield begin
        answer = self._answers[index]
        delta, token_ids = answer.delta(output), self._chat.token_ids(output)
        if not delta and output.finish_reason is None and output.logprobs is None and token_ids is None:
            return
        choice = ChatStreamChoice(
            index=index,
            delta=delta,
            logprobs=self._chat.logprobs(output),
            finish_reason=answer.finish_reason(output),
            stop_reason=output.stop_reason,
            token_ids=token_ids,
        )
        yield self._chunk([choice])

    def usage_chunk(self, usage: UsageInfo) -> ChatStreamResponse:
        """The last one."""
        return self._chunk([], usage)


def _renamed(error: InvalidRequestError, request: ChatCompletionRequest) -> InvalidRequestError:
    """The same refusal about the field that the client sent: chats have no prompt, and two names for max_tokens."""
    if error.param == "max_tokens" and request.max_completion_tokens is not None:
        return InvalidRequestError(str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens")
    return InvalidRequestError(str(error), "messages" if error.param == "prompt" else error.param)


class OpenAIServingChat(OpenAIServing):
    """Answers chats."""

    def __init__(
        self, engine_client: AsyncLLM, models: OpenAIServingModels, template: ChatTemplate, args: FrontendArgs
    ) -> None:
        super().__init__(engine_client, models, args)
        self._template, self._role = template, args.response_role
        self.parsers: Any = None  # the feature that takes answers apart, once a flag or a request asks for it

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | AsyncGenerator[bytes, None]:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        try:
            return await self._create(request, raw_request)
        except InvalidRequestError as error:
            raise _renamed(error, request) from None

    async def _create(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | AsyncGenerator[bytes, None]:
        ids, model = self.ids(request, raw_request), self.check(request)
        if trace.on:
            trace.emit("request.validated", req=ids.engine_id(0), model=model, stream=bool(request.stream), prompts=1)
        params = request.to_sampling_params(self.defaults)
        parsers = self.parsers_for(request)
        shown = request if parsers is None else parsers.shown_to_template(request)
        prompt = await asyncio.to_thread(self._template.apply, request.messages, shown)
        if trace.on:
            count = len(request.messages)
            trace.emit("request.templated", req=ids.engine_id(0), messages=count, characters=len(prompt))
        special = self._template.adds_special_tokens(request.add_special_tokens)
        requests = await self.make_requests(request, [prompt], params, ids, model, raw_request.receive, special)
        chat = self._answers(request, requests, prompt)
        if request.stream:
            return await self.begin_stream(request, requests, ChatChunks(chat), raw_request.receive)
        return await run_until_disconnect(raw_request.receive, self._whole(chat))

    def parsers_for(self, request: ChatCompletionRequest) -> Any:
        """The feature that takes the answers apart; None if no flag and no field of the request asks for it. Raises
        InvalidRequestError if it cannot do what the request asks for."""
        for feature in request.used_features():
            if feature.parser_class and self.parsers is None:
                self.parsers = load(feature.parser_class)(self.args)
        if self.parsers is not None:
            self.parsers.check(request)
        return self.parsers

    def _answers(self, request: ChatCompletionRequest, requests: EngineRequests, prompt: str) -> ChatContext:
        """The answers have the server's role, or that of the message that they go on with."""
        last = request.messages[-1]
        role = self._role if request.add_generation_prompt is not False else last.role
        new_answer: Callable[[], Answer] = PlainAnswer
        if self.parsers is not None:
            new_answer = self.parsers.for_request(request, prompt, requests) or PlainAnswer
        return ChatContext(
            requests,
            self.engine_client.tokenizer,
            role,
            text_of(last) if request.echo and last.role == role else "",
            prompt if request.return_prompt_text else None,
            new_answer,
        )

    async def _whole(self, chat: ChatContext) -> ChatCompletionResponse:
        created, requests = int(time.time()), chat.requests
        (output,) = await self.full(requests)
        response = ChatCompletionResponse(
            id=requests.ids.response,
            created=created,
            model=requests.model,
            choices=[self._choice(one, chat) for one in output.outputs],
            usage=requests.usage([len(one.token_ids) for one in output.outputs]),
            prompt_token_ids=requests.shown_prompt_ids(0),
            prompt_text=chat.prompt_text,
        )
        for hook in requests.hooks:
            hook.response(response)
        return response

    def _choice(self, output: CompletionOutput, chat: ChatContext) -> ChatChoice:
        answer = chat.new_answer()
        fields = answer.message(output)
        if chat.echoed:
            fields["content"] = chat.echoed + (fields["content"] or "")
        return ChatChoice(
            index=output.index,
            message=ChatMessage(role=chat.role, **fields),
            logprobs=chat.logprobs(output),
            finish_reason=answer.finish_reason(output),
            stop_reason=output.stop_reason,
            token_ids=chat.token_ids(output),
        )
