"""/v1/responses: create, retrieve, cancel, delete (vllm/entrypoints/openai/responses/serving.py, OpenAIServingResponses).

A response is made by one generator of events. A whole answer drains it; a stream sends it; a background
response is a task that drains it into a log, which any number of readers may follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request

from stage02_server.api_server import Services
from stage02_server.errors import as_reported
from stage02_server.features.responses.encoded import decoded_items, encoded_items
from stage02_server.features.responses.maker import ResponseMaker
from stage02_server.features.responses.protocol import LOGPROBS, ResponsesRequest, in_words_of_responses, to_messages
from stage02_server.features.responses.protocol_output import ResponseProgress
from stage02_server.features.responses.store import LOG_STEP, EventLog, ResponseStore, StoredResponse
from stage02_server.features.structured_outputs.refusal_first import RefusalFirst
from stage02_server.features.tools.answer_parser import AnswerParser
from stage02_server.features.tools.prompt import prompt_of, tokenized
from stage02_server.middleware import TENANT, RequestIds
from stage02_server.protocol import ChatCompletionRequest, ChatMessageParam
from stage02_server.serving_chat import OpenAIServingChat
from stage02_server.serving_engine import EngineRequests, OpenAIServing, Outputs
from stage02_server.streaming import run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stagetrace import trace

Answer = bytes | AsyncGenerator[bytes, None]  # whole, as JSON, or its events


class OpenAIServingResponses(OpenAIServing):
    """Answers inputs, and remembers its answers."""

    def __init__(self, services: Services, chat: OpenAIServingChat) -> None:
        super().__init__(services)
        self._template, self._chat = services.template, chat
        self._num_keys = len(set(getattr(self.args, "api_key", None) or ())) or 1
        self._stores: dict[int | None, ResponseStore] = {}  # key -> what it stored

    @property
    def _store(self) -> ResponseStore:
        """The store of the asking key: it holds nothing of the others, and how much they store changes nothing."""
        tenant = TENANT.get()
        if tenant not in self._stores:
            part = self.args.max_stored_bytes // self._num_keys
            self._stores[tenant] = ResponseStore(self.args.max_stored_responses, part)
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
        earlier = self._earlier(request)
        chat, items = await asyncio.to_thread(self._as_chat, request, earlier, keep)  # there may be thousands of items
        self._check_answer(request, chat)
        params = request.to_sampling_params(self.defaults, chat)
        prompt = await prompt_of(chat, self._template, self._chat.parsers, raw_request, ids)
        special = self._template.adds_special_tokens(None)
        requests = await tokenized(self, request, chat, prompt, params, model, special, raw_request)
        structured = params.structured_outputs is not None
        if structured:
            requests.hooks.append(RefusalFirst())
        parsers = self._chat.parsers
        parser = None if parsers is None else parsers.parser(chat, prompt, structured)
        if parsers is not None:
            parsers.keep_tags(chat, requests)
        entry = await asyncio.to_thread(self._entry, request, requests, keep, parser, items)  # megabytes of tools
        maker = entry.maker
        assert maker is not None
        raw_request.state.cut, outputs = entry.cut, self.ask(request, requests)
        if request.background:
            answer = self._in_background(entry, maker, outputs, ids, bool(request.stream))
            # If the server ends before this work does, the engine is told.
            background = raw_request.app.state.gate.background
            assert entry.task is not None
            background.add(entry.task)
            entry.task.add_done_callback(background.discard)
            return answer
        source = await self.begin(requests, outputs, raw_request.receive)
        events = self._events(maker, source, entry, keep)
        if request.stream:
            return self._sent(_until_failure(events, maker), ids)
        await run_until_disconnect(raw_request.receive, _drain(events))
        return entry.whole

    def _entry(
        self, request: ResponsesRequest, requests: EngineRequests, keep: bool, parser: AnswerParser | None,
        items: list[bytes],
    ) -> StoredResponse:  # fmt: skip
        maker = ResponseMaker(request, requests, self.engine_client.tokenizer, keep, parser)
        return StoredResponse(maker, items, requests.engine_requests if request.background else [])

    def _is_kept(self, request: ResponsesRequest) -> bool:
        """True if the response is to be stored. Raises InvalidRequestError for a background response that is not."""
        keep = request.store is not False and self._store.enabled
        if request.background and not keep:
            reason = (
                "store=true" if self._store.enabled else "a server that stores responses, see --max-stored-responses"
            )
            raise InvalidRequestError(f"background=true needs {reason}.", "background")
        return keep

    def _earlier(self, request: ResponsesRequest) -> list[bytes]:
        """The conversation that the request continues. Raises APIError and InvalidRequestError."""
        if request.previous_response_id is None:
            return []
        previous = self._store.get(request.previous_response_id, "previous_response_id")
        if previous.state not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"The previous response has no answer; its status is {previous.state}.",
                "previous_response_id",
            )
        return previous.items

    def _as_chat(
        self, request: ResponsesRequest, earlier: list[bytes], keep: bool
    ) -> tuple[ChatCompletionRequest, list[bytes]]:
        """(the conversation and what may be called, what is to be stored of it). Instructions hold for this response only; those of
        earlier ones are not carried over, as with OpenAI, and neither are their tools. Raises InvalidRequestError."""
        if not request.input:
            raise InvalidRequestError("input must not be empty.", "input")
        messages = to_messages([*decoded_items(earlier), *request.items()])
        if request.instructions:
            messages = [ChatMessageParam(role="system", content=request.instructions), *messages]
        return request.as_chat(messages), [*earlier, *encoded_items(request.items())] if keep else []

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
        last, items, body = await asyncio.to_thread(self._last, maker)  # it writes the whole answer four times
        entry.end(items, body, maker.progress.status)
        if keep and entry.task is None:
            self._store.add(entry)  # before the client sees its end and continues from it
        for event in last:
            yield event

    @staticmethod
    def _last(maker: ResponseMaker) -> tuple[list[bytes], list[bytes], bytes]:
        """(the last events, the output and the whole response as JSON)"""
        return list(maker.end()), maker.items(), maker.whole

    async def _sent(self, events: AsyncGenerator[bytes, None], ids: RequestIds) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for event in events:
                if trace.on:
                    trace.emit("sse.chunk", req=ids.engine_id(0), cause=ids.cause, bytes=len(event))
                yield event

    def _in_background(
        self, entry: StoredResponse, maker: ResponseMaker, outputs: Outputs, ids: RequestIds, stream: bool
    ) -> Answer:
        entry.log = EventLog() if stream else None
        self._store.add(entry)
        created = maker.whole  # queued; the task changes it
        entry.task = asyncio.create_task(self._work(entry, maker, outputs))
        entry.task.add_done_callback(lambda _: self._ended(entry))  # even if it is cancelled before it begins
        if entry.log is None:
            return created
        return self._sent(entry.log.read(0), ids)

    async def _work(self, entry: StoredResponse, maker: ResponseMaker, outputs: Outputs) -> None:
        async with aclosing(_until_failure(self._events(maker, outputs, entry, keep=True), maker)) as events:
            async for event in events:
                if (log := entry.log) is not None:
                    before = log.num_bytes // LOG_STEP
                    log.append(event)
                    if log.num_bytes // LOG_STEP > before:
                        self._store.make_room()

    def _ended(self, entry: StoredResponse) -> None:
        if (maker := entry.maker) is not None:  # it failed, or did not come to its end
            if maker.progress.status != "failed":
                maker.progress = ResponseProgress(id=entry.id, status="cancelled")
            entry.end([], maker.whole, maker.progress.status)
        if entry.log is not None:
            entry.log.end()
        self._store.changed(entry)

    def retrieve(self, response_id: str, stream: bool, starting_after: int | None, raw_request: Request) -> Answer:
        """A stored response as it is now, or the events of one that was created with background and stream, from after
        number `starting_after` on. Raises APIError and InvalidRequestError."""
        entry = self._store.get(response_id, "response_id")
        if not stream:
            return entry.whole
        if entry.log is None:
            raise InvalidRequestError(
                "Only a response created with background=true and stream=true can be streamed.", "stream"
            )
        raw_request.state.cut = entry.cut
        events = entry.log.read(0 if starting_after is None else starting_after + 1)
        return events

    async def cancel(self, response_id: str) -> bytes:
        """End a background response, unless it has ended already, and return it as JSON. Raises APIError and
        InvalidRequestError."""
        entry = self._store.get(response_id, "response_id")
        if entry.task is None:
            raise InvalidRequestError("Only a response created with background=true can be cancelled.", "response_id")
        await self._end(entry.task)
        return entry.whole

    async def delete(self, response_id: str) -> None:
        """Forget a response; one that runs in the background is ended first. Responses that continue it keep its items.
        Raises APIError."""
        store = self._store
        if (task := store.get(response_id, "response_id").task) is not None:
            await self._end(task)
        store.remove(response_id)

    @staticmethod
    async def _end(task: asyncio.Task[None]) -> None:
        """Cancel the work, if it goes on, and wait until it has cleaned up."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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
        yield maker.fail(as_reported(error, maker.progress.id))
