"""/v1/responses: create, retrieve, cancel (vllm/entrypoints/openai/responses/serving.py, OpenAIServingResponses).

A response is made by one generator of events. A whole answer drains it; a stream sends it; a background
response is a task that drains it into a log, which any number of readers may follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request

from stage02_server.chat_template import ChatTemplate
from stage02_server.cli_args import FrontendArgs
from stage02_server.errors import as_reported
from stage02_server.features.responses.maker import ResponseMaker
from stage02_server.features.responses.protocol import (
    LOGPROBS,
    InputItem,
    ResponsesRequest,
    in_words_of_responses,
    to_messages,
)
from stage02_server.features.responses.protocol_output import ResponsesResponse
from stage02_server.features.responses.store import EventLog, ResponseStore, StoredResponse
from stage02_server.features.structured_outputs.refusal_first import RefusalFirst
from stage02_server.features.tools.prompt import prompt_of
from stage02_server.middleware import TENANT, RequestIds
from stage02_server.protocol import ChatCompletionRequest, ChatMessageParam
from stage02_server.routes import OpenAIServingModels
from stage02_server.serving_chat import OpenAIServingChat
from stage02_server.serving_engine import EngineRequests, OpenAIServing, Outputs
from stage02_server.streaming import run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stagetrace import trace

Answer = ResponsesResponse | AsyncGenerator[bytes, None]  # whole, or its events


class OpenAIServingResponses(OpenAIServing):
    """Answers inputs, and remembers its answers."""

    def __init__(
        self,
        engine_client: AsyncLLM,
        models: OpenAIServingModels,
        template: ChatTemplate,
        args: FrontendArgs,
        chat: OpenAIServingChat,
    ) -> None:
        super().__init__(engine_client, models, args)
        self._template, self._chat = template, chat
        self._num_keys = len(set(getattr(args, "api_key", None) or ())) or 1
        self._stores: dict[int | None, ResponseStore] = {}  # key -> what it stored

    @property
    def _store(self) -> ResponseStore:
        """That of the key that asks: what others stored is not in it, and how much they store changes nothing."""
        tenant = TENANT.get()
        if tenant not in self._stores:
            self._stores[tenant] = ResponseStore(self.args.max_stored_responses, self._num_keys)
        return self._stores[tenant]

    async def create_responses(self, request: ResponsesRequest, raw_request: Request) -> Answer:
        """The response, or its events. Raises every refusal before a stream begins."""
        model = self.check(request)
        try:
            return await self._create(request, raw_request, model)
        except InvalidRequestError as error:
            raise in_words_of_responses(error) from error

    async def _create(self, request: ResponsesRequest, raw_request: Request, model: str) -> Answer:
        ids, keep = raw_request.state.ids, self._is_kept(request)
        if trace.on:
            trace.emit("request.validated", req=ids.engine_id(0), model=model, stream=bool(request.stream), prompts=1)
        items = [*self._earlier(request), *request.items()]
        chat = await asyncio.to_thread(self._as_chat, request, items)  # there may be thousands of items
        self._check_answer(request, chat)
        params = request.to_sampling_params(self.defaults, chat)
        prompt = await prompt_of(chat, self._template, self._chat.parsers, raw_request.receive, ids)
        special = self._template.adds_special_tokens(None)
        requests = await self.make_requests(request, [prompt], params, ids, model, raw_request.receive, special)
        structured = params.structured_outputs is not None
        if structured:
            requests.hooks.append(RefusalFirst())
        parsers = self._chat.parsers
        parser = None if parsers is None else parsers.parser(chat, prompt, structured)
        maker = ResponseMaker(request, requests, self.engine_client.tokenizer, keep, parser)
        entry = StoredResponse(maker.response, items, cut=maker.cut)
        raw_request.state.cut = entry.cut
        if request.background:
            answer = self._in_background(entry, maker, requests, bool(request.stream))
            # Where the server ends with its work undone, the engine hears so.
            background = raw_request.app.state.gate.background
            assert entry.task is not None
            background.add(entry.task)
            entry.task.add_done_callback(background.discard)
            return answer
        source = await self.begin(requests, raw_request.receive)
        events = self._events(maker, source, entry, keep)
        if request.stream:
            return self._sent(_until_failure(events, maker), ids)
        await run_until_disconnect(raw_request.receive, _drain(events))
        return maker.response

    def _is_kept(self, request: ResponsesRequest) -> bool:
        """True if the response is to be stored. Raises InvalidRequestError for a background response that is not."""
        keep = request.store is not False and self._store.enabled
        if request.background and not keep:
            reason = (
                "store=true" if self._store.enabled else "a server that stores responses, see --max-stored-responses"
            )
            raise InvalidRequestError(f"background=true needs {reason}.", "background")
        return keep

    def _earlier(self, request: ResponsesRequest) -> list[InputItem]:
        """The conversation that the request continues. Raises APIError and InvalidRequestError."""
        if request.previous_response_id is None:
            return []
        previous = self._store.get(request.previous_response_id, "previous_response_id")
        if previous.response.status not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"The previous response has no answer; its status is {previous.response.status}.",
                "previous_response_id",
            )
        return previous.items

    def _as_chat(self, request: ResponsesRequest, items: list[InputItem]) -> ChatCompletionRequest:
        """The conversation, and what may be called. Instructions hold for this response only; those of earlier ones are not
        carried over, as with OpenAI, and neither are their tools. Raises InvalidRequestError."""
        if not request.input:
            raise InvalidRequestError("input must not be empty.", "input")
        messages = to_messages(items)
        if request.instructions:
            messages = [ChatMessageParam(role="system", content=request.instructions), *messages]
        return request.as_chat(messages)

    def _check_answer(self, request: ResponsesRequest, chat: ChatCompletionRequest) -> None:
        """Raises InvalidRequestError for an answer that cannot be parsed or told."""
        self._chat.parsers_for(chat)
        if LOGPROBS in (request.include or []) and chat.tools and chat.tool_choice != "none":
            raise InvalidRequestError(
                f"{LOGPROBS} cannot be told of an answer that may call tools; leave one of both out.", "include"
            )

    async def _events(
        self, maker: ResponseMaker, source: Outputs, entry: StoredResponse, keep: bool
    ) -> AsyncGenerator[bytes, None]:
        """Every event of a response that succeeds. Raises what the engine raises."""
        async with aclosing(source) as outputs:
            for event in maker.begin():
                yield event
            async for _, output in outputs:
                for event in maker.add(output.outputs[0]):
                    yield event
        last = await asyncio.to_thread(lambda: list(maker.end()))  # it tells the whole answer four times
        entry.items = [*entry.items, *maker.items]
        if keep and entry.task is None:
            self._store.add(entry)  # before the client sees its end and continues from it
        for event in last:
            yield event

    async def _sent(self, events: AsyncGenerator[bytes, None], ids: RequestIds) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for event in events:
                if trace.on:
                    trace.emit("sse.chunk", req=ids.engine_id(0), cause=ids.cause, bytes=len(event))
                yield event

    def _in_background(
        self, entry: StoredResponse, maker: ResponseMaker, requests: EngineRequests, stream: bool
    ) -> Answer:
        entry.log = EventLog() if stream else None
        self._store.add(entry)
        created = maker.response.model_copy()  # queued; the task changes the other one
        entry.task = asyncio.create_task(self._work(entry, maker, requests))
        entry.task.add_done_callback(lambda _: self._ended(entry))  # even if it is cancelled before it begins
        if entry.log is None:
            return created
        return self._sent(entry.log.read(0), requests.ids)

    async def _work(self, entry: StoredResponse, maker: ResponseMaker, requests: EngineRequests) -> None:
        async with aclosing(
            _until_failure(self._events(maker, self.outputs(requests), entry, keep=True), maker)
        ) as events:
            async for event in events:
                if entry.log is not None:
                    entry.log.append(event)

    def _ended(self, entry: StoredResponse) -> None:
        if entry.running:
            entry.response.status = "cancelled"
        if entry.log is not None:
            entry.log.end()
        self._store.update_size(entry)

    def retrieve(self, response_id: str, stream: bool, starting_after: int | None, raw_request: Request) -> Answer:
        """A stored response as it is now, or the events of one that was created with background and stream, from after
        number `starting_after` on. Raises APIError and InvalidRequestError."""
        entry = self._store.get(response_id, "response_id")
        if not stream:
            return entry.response
        if entry.log is None:
            raise InvalidRequestError(
                "Only a response created with background=true and stream=true can be streamed.", "stream"
            )
        raw_request.state.cut = entry.cut
        events = entry.log.read(0 if starting_after is None else starting_after + 1)
        return events

    async def cancel(self, response_id: str) -> ResponsesResponse:
        """End a background response, unless it has ended already, and return it. Raises APIError and
        InvalidRequestError."""
        entry = self._store.get(response_id, "response_id")
        if entry.task is None:
            raise InvalidRequestError("Only a response created with background=true can be cancelled.", "response_id")
        entry.task.cancel()
        await asyncio.gather(entry.task, return_exceptions=True)
        return entry.response


async def _drain(events: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _until_failure(events: AsyncGenerator[bytes, None], maker: ResponseMaker) -> AsyncGenerator[bytes, None]:
    """The same events; an error becomes the last of them, as the HTTP status has been sent by then."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:
        if isinstance(error, InvalidRequestError):
            error = in_words_of_responses(error)
        yield maker.fail(as_reported(error, maker.response.id))
