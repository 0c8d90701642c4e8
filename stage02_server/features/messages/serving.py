"""/v1/messages and /v1/messages/count_tokens (vllm/entrypoints/anthropic/serving.py, AnthropicServingMessages).

A request becomes a chat, which takes the path of all chats up to the engine; its answer becomes blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.requests import Request

from stage02_server.api_server import Services
from stage02_server.errors import as_reported
from stage02_server.features.messages.errors import error_event
from stage02_server.features.messages.maker import MessageMaker
from stage02_server.features.messages.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    in_words_of_messages,
)
from stage02_server.features.messages.protocol_answer import (
    AnthropicContextManagement,
    AnthropicCountTokensResponse,
    AnthropicMessagesResponse,
)
from stage02_server.features.structured_outputs.fields import is_structured
from stage02_server.features.tools.prompt import images_in, prompt_of, tokenized
from stage02_server.middleware import RequestIds
from stage02_server.serving_chat import OpenAIServingChat
from stage02_server.serving_engine import OpenAIServing, Outputs
from stage02_server.streaming import in_thread_if_long, run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stage03_engine.plugins import loaded
from stagetrace import trace

Answer = AnthropicMessagesResponse | AsyncGenerator[bytes, None]  # whole, or its events


class AnthropicServingMessages(OpenAIServing):
    """Answers conversations in Anthropic's form."""

    def __init__(self, services: Services, chat: OpenAIServingChat) -> None:
        super().__init__(services)
        self._template, self._chat = services.template, chat

    async def create_messages(self, request: AnthropicMessagesRequest, raw_request: Request) -> Answer:
        """The message, or its events. Raises every refusal before a stream begins."""
        try:
            return await self._create(request, raw_request)
        except InvalidRequestError as error:
            raise in_words_of_messages(error) from error

    async def _create(self, request: AnthropicMessagesRequest, raw_request: Request) -> Answer:
        ids, receive = raw_request.state.ids, raw_request.receive
        chat = await asyncio.to_thread(request.as_chat)  # there may be thousands of blocks
        model = self.check(chat)
        self.trace_validated(chat, ids, model, 1)
        params, parsers = chat.to_sampling_params(self.defaults), self._chat.parsers_for(chat)
        prompt = await prompt_of(chat, self._template, parsers, raw_request, ids)
        special = self._template.adds_special_tokens(None)
        requests = await tokenized(self, chat, chat, prompt, params, model, special, raw_request)
        parser = None if parsers is None else parsers.parser(chat, prompt, is_structured(requests))
        if parsers is not None:
            parsers.keep_tags(chat, requests)
        maker = MessageMaker(requests, parser)
        events = _events(maker, await self.begin(requests, self.ask(chat, requests), receive))
        if request.stream:
            return _sent(events, ids)
        await run_until_disconnect(receive, _drain(events))
        return maker.message

    async def count_tokens(
        self, request: AnthropicCountTokensRequest, raw_request: Request
    ) -> AnthropicCountTokensResponse:
        """How many tokens the prompt has. Raises APIError, InvalidRequestError, and ClientGoneError."""
        try:
            return await self._count(request, raw_request)
        except InvalidRequestError as error:
            raise in_words_of_messages(error) from error

    async def _count(self, request: AnthropicCountTokensRequest, raw_request: Request) -> AnthropicCountTokensResponse:
        chat = await asyncio.to_thread(request.as_chat)
        self.check(chat)
        receive = raw_request.receive
        prompt = await prompt_of(chat, self._template, self._chat.parsers_for(chat), raw_request)
        for check in loaded("server", "text_limit"):
            check(self.args, prompt, "messages")
        encode = partial(self.engine_client.tokenizer.encode, prompt, self._template.adds_special_tokens(None))
        count = len(await in_thread_if_long([prompt], receive, encode))
        if (images := images_in(raw_request)) is not None:
            count += images.more_tokens(chat)
        same = AnthropicContextManagement(original_input_tokens=count)
        return AnthropicCountTokensResponse(input_tokens=count, context_management=same)


async def _events(maker: MessageMaker, source: Outputs) -> AsyncGenerator[bytes, None]:
    """Every event of a message that succeeds. Raises what the engine raises, and APIError."""
    async with aclosing(source) as outputs:
        async for _, output in outputs:
            for event in maker.add(output.outputs[0]):
                yield event
    for event in maker.end():
        yield event


async def _drain(events: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _sent(events: AsyncGenerator[bytes, None], ids: RequestIds) -> AsyncGenerator[bytes, None]:
    """The same events; an error becomes the last of them, as the HTTP status has been sent by then."""
    async with aclosing(_until_failure(events, ids)) as all_events:
        async for event in all_events:
            if trace.on:
                trace.emit("sse.chunk", req=ids.engine_id(0), cause=ids.cause, bytes=len(event))
            yield event


async def _until_failure(events: AsyncGenerator[bytes, None], ids: RequestIds) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:
        yield error_event(as_reported(error, ids.response))
