"""POST /v1/chat/completions (vllm/entrypoints/openai/serving_chat.py, OpenAIServingChat)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from starlette.requests import Request

from stage02_server.chat_template import ChatTemplate, plain_message
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.tools.answer_parser import AnswerDelta, AnswerParser
from stage02_server.features.tools.chat_answers import ChatAnswers, delta_fields, finish_reason, message_fields
from stage02_server.logprobs import chat_logprobs, prompt_logprobs_json
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
from stage03_engine.frontend.features.beam_search import BeamSearchParams
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.outputs import CompletionOutput
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace


def _logprobs(output: CompletionOutput, tokenizer: Tokenizer, batch: EngineRequests) -> ChatLogProbs | None:
    """Of a choice; None when nobody asked."""
    if output.logprobs is None:
        return None
    return ChatLogProbs(content=chat_logprobs(output.logprobs, tokenizer, batch.tokens_as_ids))


@dataclass
class ChatAnswer:
    """What the answers to one chat have in common."""

    request: ChatCompletionRequest
    role: str
    echoed: str  # the text with which each answer begins
    new_parser: Callable[[], AnswerParser | None]

    def parsed(self, parser: AnswerParser | None, output: CompletionOutput, req: str) -> AnswerDelta:
        """What a piece of output adds. `parser` is that of this answer."""
        if parser is None:
            return AnswerDelta(content=output.text)
        delta = parser.feed(output.text, output.finish_reason is not None)
        if trace.on and output.finish_reason is not None:
            trace.emit(
                "answer.parsed", req=req, index=output.index, reasoning_characters=parser.num_characters,
                tool_calls=parser.num_calls,
            )  # fmt: skip
        return delta

    def finish_reason(self, parser: AnswerParser | None, output: CompletionOutput) -> str | None:
        """Why the answer ended, or None."""
        return finish_reason(output.finish_reason, self.request, 0 if parser is None else parser.num_calls)


class ChatChunks:
    """Engine outputs as chunks of a chat stream. The first chunk of each answer says who speaks."""

    def __init__(self, batch: EngineRequests, tokenizer: Tokenizer, answer: ChatAnswer) -> None:
        self._batch, self._tokenizer, self._answer = batch, tokenizer, answer
        self._created = int(time.time())
        self._parsers: dict[int, AnswerParser | None] = {}

    def _chunk(self, choices: list[ChatStreamChoice], usage: UsageInfo | None = None) -> ChatStreamResponse:
        return ChatStreamResponse(
            id=self._batch.ids.response, created=self._created, model=self._batch.model, choices=choices, usage=usage
        )

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[ChatStreamResponse]:
        """One chunk, and before it the role if this is the answer's first. None for what a parser holds back."""
        if index not in self._parsers:
            self._parsers[index] = self._answer.new_parser()
            first = {"role": self._answer.role, "content": self._answer.echoed}
            begin = self._chunk([ChatStreamChoice(index=index, delta=first)])
            begin.prompt_token_ids, begin.prompt_text = self._batch.shown_prompt_ids(index), self._batch.prompt_text
            yield begin
        parser = self._parsers[index]
        delta = self._answer.parsed(parser, output, self._batch.ids.engine_id(0))
        silent = not delta and parser is not None and output.finish_reason is None
        if silent and output.logprobs is None and not self._batch.return_token_ids:
            return
        choice = ChatStreamChoice(
            index=index,
            delta={"content": delta.content} if parser is None else delta_fields(delta),
            logprobs=_logprobs(output, self._tokenizer, self._batch),
            finish_reason=self._answer.finish_reason(parser, output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._batch.return_token_ids else None,
        )
        yield self._chunk([choice])

    def usage_chunk(self, usage: UsageInfo) -> ChatStreamResponse:
        """The last one."""
        return self._chunk([], usage)


def _in_words_of_chats(error: InvalidRequestError, request: ChatCompletionRequest) -> InvalidRequestError:
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
        self.answers = ChatAnswers(args)  # responses are taken apart by the same

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | AsyncGenerator[bytes, None]:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        try:
            return await self._create(request, raw_request)
        except InvalidRequestError as error:
            raise _in_words_of_chats(error, request) from None

    async def _create(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | AsyncGenerator[bytes, None]:
        ids, model = self.ids(request, raw_request), self.check(request)
        if trace.on:
            trace.emit("request.validated", req=ids.engine_id(0), model=model, stream=bool(request.stream), prompts=1)
        params = request.to_sampling_params()
        self.answers.check(request)
        fields = self.answers.shown_to_template(request)
        prompt = await asyncio.to_thread(self._template.apply, request.messages, fields)
        if trace.on:
            count = len(request.messages)
            trace.emit("request.templated", req=ids.engine_id(0), messages=count, characters=len(prompt))
        special = self._template.adds_special_tokens(request.add_special_tokens)
        batch = await self.make_batch(request, [prompt], params, ids, model, raw_request.receive, special)
        batch.prompt_text = prompt if request.return_prompt_text else None
        answer = self._answer(request, prompt, params)
        if request.stream:
            maker = ChatChunks(batch, self.engine_client.tokenizer, answer)
            return await self.begin_stream(request, batch, maker, raw_request.receive)
        return await run_until_disconnect(raw_request.receive, self._whole(batch, answer))

    def _answer(
        self, request: ChatCompletionRequest, prompt: str, params: SamplingParams | BeamSearchParams
    ) -> ChatAnswer:
        """The answer has the server's role, or that of the message that it goes on with."""
        last = request.messages[-1]
        role = self._role if request.add_generation_prompt is not False else last.role
        echoed = plain_message(last, "string")["content"] if request.echo and last.role == role else ""
        structured = isinstance(params, SamplingParams) and params.structured_outputs is not None
        return ChatAnswer(request, role, echoed, lambda: self.answers.parser(request, prompt, structured))

    async def _whole(self, batch: EngineRequests, answer: ChatAnswer) -> ChatCompletionResponse:
        created = int(time.time())
        (output,) = await self.full(batch)
        return ChatCompletionResponse(
            id=batch.ids.response,
            created=created,
            model=batch.model,
            choices=[self._choice(one, answer, batch) for one in output.outputs],
            usage=batch.usage([len(one.token_ids) for one in output.outputs]),
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs, self.engine_client.tokenizer),
            prompt_token_ids=batch.shown_prompt_ids(0),
            prompt_text=batch.prompt_text,
            metrics=batch.metrics(),
        )

    def _choice(self, output: CompletionOutput, answer: ChatAnswer, batch: EngineRequests) -> ChatChoice:
        parser = answer.new_parser()
        fields = message_fields(answer.parsed(parser, output, batch.ids.engine_id(0)))
        if answer.echoed:
            fields["content"] = answer.echoed + (fields["content"] or "")
        return ChatChoice(
            index=output.index,
            message=ChatMessage(role=answer.role, **fields),
            logprobs=_logprobs(output, self.engine_client.tokenizer, batch),
            finish_reason=answer.finish_reason(parser, output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if batch.return_token_ids else None,
        )
