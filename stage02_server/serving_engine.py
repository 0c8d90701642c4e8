"""What completions and chats share: from prompts to a merged flow of outputs, streamed or whole, for as long as the client
listens (vllm/entrypoints/openai/serving_engine.py OpenAIServing).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from stage02_server.cli_args import FrontendArgs
from stage02_server.errors import APIError, as_reported, error_json, not_found, unavailable
from stage02_server.features.per_request_metrics import PerRequestMetrics, metrics_of
from stage02_server.middleware import RequestIds
from stage02_server.protocol import SamplingRequest
from stage02_server.protocol_response import (
    ChatStreamResponse,
    CompletionResponse,
    PromptTokensDetails,
    UsageInfo,
)
from stage02_server.routes import OpenAIServingModels
from stage02_server.streaming import in_thread_if_long, run_until_disconnect
from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.beam_search import BeamSearchParams
from stage03_engine.frontend.metrics import RequestStats
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (number of the prompt, what came)
MAX_ANSWERS = 4096  # of one HTTP request with n or best_of above 1
DEFAULTS = FrontendArgs()


@dataclass
class EngineRequests:
    """The engine requests that one HTTP request became, one per prompt; answer k of prompt p is number p * n + k."""

    ids: RequestIds
    model: str
    n: int
    requests: list[EngineCoreRequest]
    beam: BeamSearchParams | None = None  # search instead of sampling
    tokens_as_ids: bool = False  # tokens in logprobs read "token_id:5", which no two tokens share
    return_token_ids: bool = False  # beside every text the ids of its tokens
    prompt_text: str | None = None  # of a chat, if it is to be told
    tells_metrics: bool = False  # --enable-per-request-metrics
    ended: list[RequestStats] = field(default_factory=list)  # the histories of the answers that have ended
    prompt_only: bool = False  # the engine draws a token because it must; nobody is to see it
    cached_tokens: dict[int, int] = field(default_factory=dict)  # prompt -> its tokens from the prefix cache
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(
        default_factory=dict
    )  # prompt -> as in RequestOutput

    def take_note(self, prompt: int, output: RequestOutput) -> None:
        """Remember what an output says about its prompt, and with `prompt_only` take the answer out of it."""
        self.cached_tokens[prompt] = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = output.prompt_logprobs
        self.ended += [answer.stats for answer in output.outputs if answer.stats is not None]
        if self.prompt_only:
            for answer in output.outputs:
                answer.text, answer.token_ids = "", []
                answer.logprobs = None if answer.logprobs is None else []
                answer.finish_reason, answer.stop_reason = "length", None

    def shown_prompt_ids(self, index: int) -> list[int] | None:
        """The token ids of the prompt of answer `index`, if they were asked for."""
        return self.requests[index // self.n].prompt_token_ids if self.return_token_ids else None

    def metrics(self) -> PerRequestMetrics | None:
        """How long it took, if that is to be told and there is a token to tell of."""
        return metrics_of([stats for stats in self.ended if stats.num_output_tokens]) if self.tells_metrics else None

    def usage(self, completion_tokens: list[int]) -> UsageInfo:
        """Totals, from the output tokens of each answer."""
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        return make_usage(prompt, sum(completion_tokens), sum(self.cached_tokens.values()))

    def usage_of(self, index: int, completion_tokens: int) -> UsageInfo:
        """The usage of one answer alone."""
        prompt = index // self.n
        num_tokens = len(self.requests[prompt].prompt_token_ids)
        return make_usage(num_tokens, completion_tokens, self.cached_tokens.get(prompt, 0))


def make_usage(prompt: int, completion: int, cached: int = 0) -> UsageInfo:
    """From the tokens of the prompt, those of the answer, and those of the prompt that cost nothing."""
    return UsageInfo(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


_HOW = {
    "generate": "serve a model that writes text, without --runner pooling and --convert",
    "embed": "serve a model with --runner pooling, or one with a classification head with --convert embed",
    "token_embed": "serve a model with --runner pooling, or one with a classification head with --convert embed",
    "score": "serve a model with --runner pooling, or one whose classification head has one class",
    "classify": "serve one with a classification head",
    "token_classify": "serve one with a classification head",
    "transcription": "serve a Whisper model",
    "translation": "serve a Whisper model",
}
"""Task -> what would have it."""


def no_task(task: str) -> APIError:
    """404: the served model cannot do this, whatever the request says."""
    return not_found(f"This server's model has no {task} task: {_HOW[task]}.", "model")


def require_task(config: VllmConfig, task: str) -> None:
    """Raises APIError 404 when the served model does not have the task."""
    if task not in config.supported_tasks:
        raise no_task(task)


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


async def collect(engine_client: AsyncLLM, requests: list[EngineCoreRequest]) -> list[RequestOutput]:
    """The last output of each request, in their order. Raises EngineDeadError, and APIError 503 when one was aborted from
    outside: half a vector is none, and these answers have no place to say where they were cut off."""
    found: dict[int, RequestOutput] = {}
    flows = [engine_client.generate(request) for request in requests]
    async with aclosing(merge_async_iterators(flows)) as merged:
        async for index, output in merged:
            if output.outputs[0].finish_reason == "abort":
                raise unavailable("The request was aborted before it was finished.")
            found[index] = output
    return [found[index] for index in range(len(requests))]


class ChunkMaker(Protocol):
    """Turns engine outputs into the chunks of one kind of stream."""

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[CompletionResponse | ChatStreamResponse]:
        """The chunks that one output adds to answer `index`."""

    def usage_chunk(self, usage: UsageInfo) -> CompletionResponse | ChatStreamResponse:
        """The chunk without choices that ends a stream with `include_usage`."""


class OpenAIServing:
    """Base of the handlers that use the engine."""

    request_logger: Any = None  # with --enable-log-requests

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
    ) -> EngineRequests:
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
        return EngineRequests(
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

    async def outputs(self, batch: EngineRequests) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(number of the prompt, what came) until every answer is finished. Raises EngineDeadError."""
        engine, beam = self.engine_client, batch.beam
        flows = [engine.generate(r) if beam is None else engine.beam_search(r, beam) for r in batch.requests]
        async with aclosing(merge_async_iterators(flows)) as merged:
            async for index, output in merged:
                batch.take_note(index, output)
                yield index, output

    async def full(self, batch: EngineRequests) -> list[RequestOutput]:
        """The last output of every prompt, with all its answers."""
        finished: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs(batch)) as outputs:
            async for index, output in outputs:
                finished[index] = output
        return [finished[index] for index in range(len(batch.requests))]

    async def begin_stream(
        self, request: SamplingRequest, batch: EngineRequests, maker: ChunkMaker, receive: Receive
    ) -> AsyncGenerator[bytes, None]:
        """The stream of `stream`, which has not begun yet, so that a refusal is still an HTTP status of its own."""
        return self.stream(request, batch, maker, await self.begin_outputs(batch, receive))

    async def begin_outputs(self, batch: EngineRequests, receive: Receive) -> Outputs:
        """`outputs`; with structured output when the first one is there: only the engine can tell whether a grammar compiles."""
        outputs = self.outputs(batch)
        if batch.requests[0].sampling_params.structured_outputs is not None:
            outputs = await run_until_disconnect(receive, _after_first(outputs))
        return outputs

    async def stream(
        self,
        request: SamplingRequest,
        batch: EngineRequests,
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
