"""What completions and chats share: from prompts to a merged flow of outputs, streamed or whole, for as long as the client
listens (vllm/entrypoints/openai/serving_engine.py OpenAIServing).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from stage02_server.batch import Batch
from stage02_server.cli_args import FrontendArgs
from stage02_server.disconnects import in_thread_if_long, run_until_disconnect
from stage02_server.errors import as_reported, error_json
from stage02_server.keep_alive import kept_alive
from stage02_server.middleware import RequestIds
from stage02_server.protocol import SamplingRequest
from stage02_server.protocol_response import (
    ChatStreamResponse,
    CompletionResponse,
    PromptLogprob,
    UsageInfo,
)
from stage02_server.request_logger import RequestLogger
from stage02_server.serving_models import OpenAIServingModels
from stage02_server.tasks import require_task
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.beam_search import BeamSearchParams
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (number of the prompt, what came)
MAX_ANSWERS = 4096  # of one HTTP request with n or best_of above 1
DEFAULTS = FrontendArgs()
LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's number


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """How logprobs call a token: its text, or with `return_tokens_as_token_ids` "token_id:5"."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def prompt_logprobs_json(entries: list[TokenLogprobs | None] | None, tokenizer: Tokenizer) -> PromptLogprobs | None:
    """vLLM's shape: for each prompt token the tokens that could have stood there, by id; None for the first."""
    if entries is None:
        return None
    result: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranks = [entry.sampled_rank, *range(1, len(entry.token_ids))]
        position: dict[int, PromptLogprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            text = tokenizer.token_text(token_id)
            position.setdefault(token_id, PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text))
        result.append(position)
    return result


async def merge_async_iterators(
    iterators: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the iterator, its next output), from whichever iterator has one. Closes all of them at the end.

    Only one output per iterator is taken ahead: a slow client slows this down, and the collectors merge meanwhile.
    """
    waiting: dict[asyncio.Future[RequestOutput], int] = {}
    try:
        for index, iterator in enumerate(iterators):
            waiting[asyncio.ensure_future(anext(iterator))] = index
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index = waiting.pop(future)
                try:
                    output = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, output
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for iterator in iterators:
            await iterator.aclose()


class ChunkMaker(Protocol):
    """Turns engine outputs into the chunks of one kind of stream."""

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[CompletionResponse | ChatStreamResponse]:
        """The chunks that one output adds to answer `index`."""

    def usage_chunk(self, usage: UsageInfo) -> CompletionResponse | ChatStreamResponse:
        """The chunk without choices that ends a stream with `include_usage`."""


class OpenAIServing:
    """Base of the handlers that use the engine."""

    request_logger: RequestLogger | None = None  # with --enable-log-requests

    def __init__(self, engine_client: AsyncLLM, models: OpenAIServingModels, args: FrontendArgs = DEFAULTS) -> None:
        self.engine_client = engine_client
        self.models = models
        self.args = args
        self.defaults = engine_client.vllm_config.model_config.default_sampling_params or {}

    def check(self, request: SamplingRequest) -> str:
        """The model name to answer with. Raises what makes the request impossible whatever its prompt says.

        What the request leaves open is filled in from the model's generation_config.json.
        """
        self.engine_client.check_health()
        require_task(self.engine_client.vllm_config, "generate")
        model = self.models.check(request.model)
        request.check_built()
        request.fill_in(self.defaults)
        return model

    def ids(self, request: SamplingRequest, raw_request: Request) -> RequestIds:
        """Under which ids the request runs and is answered."""
        ids: RequestIds = raw_request.state.ids.named(request.request_id)
        if trace.on and ids.response != raw_request.state.ids.response:
            trace.emit("request.named", req=ids.engine_id(0), response=ids.response)
        return ids

    async def make_batch(
        self,
        request: SamplingRequest,
        prompts: list[str | list[int]],
        wishes: SamplingParams | BeamSearchParams,
        ids: RequestIds,
        model: str,
        receive: Receive,
        add_special_tokens: bool = True,
    ) -> Batch:
        """Tokenize and check every prompt, before a single byte of the answer is sent. Raises InvalidRequestError, and
        ClientGoneError when the client left while its prompts were too long to do that at once."""
        wishes = self._within_limit(wishes)
        beam = wishes if isinstance(wishes, BeamSearchParams) else None
        params = wishes if isinstance(wishes, SamplingParams) else wishes.prompt_params()
        if trace.on:
            bound = self.engine_client.vllm_config.max_model_len if params.max_tokens is None else params.max_tokens
            trace.emit(
                "request.sampling_params", req=ids.engine_id(0), temperature=params.temperature, max_tokens=bound
            )
        if params.num_answers > 1 and len(prompts) * params.num_answers > MAX_ANSWERS:
            raise InvalidRequestError(
                f"n (or best_of) times the number of prompts must be at most {MAX_ANSWERS}, got "
                f"{params.num_answers} times {len(prompts)}.",
                "n",
            )
        make = partial(self._requests, request, prompts, params, ids, add_special_tokens)
        requests = await in_thread_if_long(prompts, receive, make)
        if self.request_logger is not None:
            for engine_request, prompt in zip(requests, prompts, strict=True):
                self.request_logger.log_inputs(engine_request, prompt)
        as_ids = request.return_tokens_as_token_ids
        return Batch(
            ids,
            model,
            params.n if beam is None else beam.beam_width,
            requests,
            beam,
            tokens_as_ids=self.args.return_tokens_as_token_ids if as_ids is None else as_ids,
            return_token_ids=bool(request.return_token_ids),
            tells_metrics=self.args.enable_per_request_metrics,
        )

    def _requests(
        self,
        request: SamplingRequest,
        prompts: list[str | list[int]],
        params: SamplingParams,
        ids: RequestIds,
        add_special_tokens: bool,
    ) -> list[EngineCoreRequest]:
        return [
            self.engine_client.input_processor.process_inputs(
                ids.engine_id(index),
                prompt,
                params,
                add_special_tokens=add_special_tokens,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _within_limit(self, wishes: SamplingParams | BeamSearchParams) -> SamplingParams | BeamSearchParams:
        """`max_new_tokens` of the model's generation_config.json is the most that a request may have."""
        limit = self.defaults.get("max_tokens")
        if limit is None or (wishes.max_tokens is not None and wishes.max_tokens <= limit):
            return wishes
        return msgspec.structs.replace(wishes, max_tokens=limit)

    async def outputs(self, batch: Batch) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(number of the prompt, what came) until every answer is finished. Raises EngineDeadError."""
        engine, beam = self.engine_client, batch.beam
        flows = [engine.generate(r) if beam is None else engine.beam_search(r, beam) for r in batch.requests]
        async with aclosing(merge_async_iterators(flows)) as merged:
            async for index, output in merged:
                batch.take_note(index, output)
                yield index, output

    async def full(self, batch: Batch) -> list[RequestOutput]:
        """The last output of every prompt, with all its answers."""
        finished: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs(batch)) as outputs:
            async for index, output in outputs:
                finished[index] = output
        return [finished[index] for index in range(len(batch.requests))]

    async def begin_stream(
        self, request: SamplingRequest, batch: Batch, maker: ChunkMaker, receive: Receive
    ) -> AsyncGenerator[bytes, None]:
        """The stream of `stream`, which has not begun yet, so that a refusal is still an HTTP status of its own."""
        events = self.stream(request, batch, maker, await self.begin_outputs(batch, receive))
        return kept_alive(events, self.args.sse_keep_alive_interval)

    async def begin_outputs(self, batch: Batch, receive: Receive) -> Outputs:
        """`outputs`; with structured output when the first one is there: only the engine can tell whether a grammar compiles."""
        outputs = self.outputs(batch)
        if batch.requests[0].sampling_params.structured_outputs is not None:
            outputs = await run_until_disconnect(receive, _after_first(outputs))
        return outputs

    async def stream(
        self,
        request: SamplingRequest,
        batch: Batch,
        maker: ChunkMaker,
        source: AsyncGenerator[tuple[int, RequestOutput], None],
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events: a chunk per output of `source`, the usage if asked for, then [DONE].

        An error after the first byte can no longer change the HTTP status: it becomes an event.
        """
        counts = [0] * (len(batch.requests) * batch.n)
        include_usage = request.include_usage or self.args.enable_force_include_usage
        continuous_usage = include_usage and request.wants_continuous_usage
        hidden = {"metrics"} if include_usage else {"metrics", "usage"}
        try:
            async with aclosing(source) as outputs:
                async for prompt, output in outputs:
                    for completion in output.outputs:
                        index = prompt * batch.n + completion.index
                        counts[index] += len(completion.token_ids)
                        for chunk in maker.chunks(index, completion):
                            if continuous_usage:
                                chunk.usage = batch.usage_of(index, counts[index])
                            yield _event(chunk.model_dump_json(exclude=hidden), batch.ids, prompt)
            if include_usage:
                last = maker.usage_chunk(batch.usage(counts))
                last.metrics = batch.metrics()
                yield _event(last.model_dump_json(), batch.ids)
        except Exception as error:
            yield _event(error_json(as_reported(error, batch.ids.response)), batch.ids)
        yield _event("[DONE]", batch.ids)


async def _after_first(flow: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same flow, when its first item is there. Raises what the flow raises instead of one."""
    try:
        first = await anext(flow)
    except BaseException:
        await flow.aclose()
        raise

    async def go_on() -> AsyncGenerator[T, None]:
        async with aclosing(flow):
            yield first
            async for item in flow:
                yield item

    return go_on()


def _event(data: str, ids: RequestIds, prompt: int = 0) -> bytes:
    event = f"data: {data}\n\n".encode()
    if trace.on:
        trace.emit("sse.chunk", req=ids.engine_id(prompt), cause=ids.cause, bytes=len(event))
    return event
