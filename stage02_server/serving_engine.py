"""What completions and chats share: from prompts to a merged flow of outputs, streamed or whole, for as long as the client
listens (vllm/entrypoints/openai/serving_engine.py OpenAIServing).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Receive

from stage02_server.cli_args import FrontendArgs
from stage02_server.errors import as_reported, error_json, not_found
from stage02_server.middleware import RequestIds
from stage02_server.protocol import SamplingRequest
from stage02_server.protocol_response import (
    WITH_THE_USAGE,
    ChatStreamResponse,
    CompletionResponse,
    PromptTokensDetails,
    UsageInfo,
)
from stage02_server.protocol_types import AnswerHook
from stage02_server.routes import OpenAIServingModels
from stage02_server.streaming import in_thread_if_long, run_until_disconnect
from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (number of the prompt, output)
MAX_ANSWERS = 4096  # of one HTTP request with n or best_of above 1
DEFAULTS = FrontendArgs()


@dataclass
class EngineRequests:
    """The engine requests that one HTTP request became, one per prompt; answer k of prompt p is number p * n + k."""

    ids: RequestIds
    model: str
    n: int
    engine_requests: list[EngineCoreRequest]
    flows: list[AsyncGenerator[RequestOutput, None]]  # their answers
    compiles: bool = False  # the engine may still refuse, after it has compiled what the client wrote
    tokens_as_ids: bool = False  # tokens in logprobs read "token_id:5", which no two tokens share
    return_token_ids: bool = False  # beside every text the ids of its tokens
    hooks: list[AnswerHook] = field(default_factory=list)
    cached_tokens: dict[int, int] = field(default_factory=dict)  # prompt -> its tokens from the prefix cache

    def shown_prompt_ids(self, index: int) -> list[int] | None:
        """The token ids of the prompt of answer `index`, if the client asked for them."""
        return self.engine_requests[index // self.n].prompt_token_ids if self.return_token_ids else None

    def usage(self, completion_tokens: list[int]) -> UsageInfo:
        """Totals, from the output tokens of each answer."""
        prompt = sum(len(request.prompt_token_ids) for request in self.engine_requests)
        return make_usage(prompt, sum(completion_tokens), sum(self.cached_tokens.values()))

    def usage_of(self, index: int, completion_tokens: int) -> UsageInfo:
        """The usage of one answer alone."""
        prompt = index // self.n
        num_tokens = len(self.engine_requests[prompt].prompt_token_ids)
        return make_usage(num_tokens, completion_tokens, self.cached_tokens.get(prompt, 0))


def make_usage(prompt: int, completion: int, cached: int = 0) -> UsageInfo:
    """From the tokens of the prompt, those of the answer, and those of the prompt from the prefix cache."""
    return UsageInfo(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def require_task(config: VllmConfig, task: str, how: str) -> None:
    """Raises APIError 404 if the served model does not have the task; `how` says what to serve instead."""
    if task not in config.supported_tasks:
        raise not_found(f"This server's model has no {task} task: {how}.", "model")


async def merge_async_iterators(iterators: list[AsyncGenerator[RequestOutput, None]]) -> Outputs:
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

    request_logger: Any = None  # with --enable-log-requests

    def __init__(self, engine_client: AsyncLLM, models: OpenAIServingModels, args: FrontendArgs = DEFAULTS) -> None:
        self.engine_client = engine_client
        self.models = models
        self.args = args
        self.defaults = engine_client.vllm_config.model_config.default_sampling_params or {}
        self._generates = "generate" in engine_client.vllm_config.supported_tasks
        self.hook_factories: list[Callable[[], AnswerHook]] = []  # of features that every answer passes

    def check(self, request: SamplingRequest) -> str:
        """The model name to answer with. Raises what makes the request impossible whatever its prompt says."""
        self.engine_client.check_health()
        if not self._generates:
            how = "serve a model that writes text, without --runner pooling and --convert"
            require_task(self.engine_client.vllm_config, "generate", how)
        model = self.models.check(request.model)
        request.check_built()
        return model

    def ids(self, request: SamplingRequest, raw_request: Request) -> RequestIds:
        """The ids of the request and of its answer."""
        ids: RequestIds = raw_request.state.ids.named(request.request_id)
        if trace.on and ids.response != raw_request.state.ids.response:
            trace.emit("request.named", req=ids.engine_id(0), response=ids.response)
        return ids

    async def make_requests(
        self,
        request: SamplingRequest,
        prompts: list[str | list[int]],
        params: SamplingParams,
        ids: RequestIds,
        model: str,
        receive: Receive,
        add_special_tokens: bool = True,
    ) -> EngineRequests:
        """Tokenize and check every prompt, before a single byte of the answer is sent. Raises InvalidRequestError, and
        ClientGoneError if the client leaves while long prompts are tokenized."""
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
        process = partial(self._process, request, prompts, params, ids, add_special_tokens)
        engine_requests = await in_thread_if_long(prompts, receive, process)
        if self.request_logger is not None:
            for engine_request, prompt in zip(engine_requests, prompts, strict=True):
                self.request_logger.log_inputs(engine_request, prompt)
        as_ids = request.return_tokens_as_token_ids
        features = request.used_features()
        requests = EngineRequests(
            ids,
            model,
            1 if request.n is None else request.n,
            engine_requests,
            [self._generate(request, engine_request) for engine_request in engine_requests],
            compiles=any(feature.compiles(request, params) for feature in features),
            tokens_as_ids=self.args.return_tokens_as_token_ids if as_ids is None else as_ids,
            return_token_ids=bool(request.return_token_ids),
            hooks=[factory() for factory in self.hook_factories],
        )
        for feature in features:
            if (hook := await feature.hook(request, self, requests, prompts, receive)) is not None:
                requests.hooks.append(hook)
        return requests

    def _process(
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

    def _generate(self, request: SamplingRequest, made: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None]:
        """The flow of answers to one prompt, which begins when somebody reads it."""
        for feature in request.used_features():
            if (flow := feature.generate(request, self.engine_client, made)) is not None:
                return flow
        return self.engine_client.generate(made)

    async def outputs(self, requests: EngineRequests) -> Outputs:
        """(number of the prompt, output) until every answer is finished. Raises EngineDeadError."""
        async with aclosing(merge_async_iterators(requests.flows)) as merged:
            async for prompt, output in merged:
                requests.cached_tokens[prompt] = output.num_cached_tokens
                for hook in requests.hooks:
                    hook.output(prompt, output)
                yield prompt, output

    async def full(self, requests: EngineRequests) -> list[RequestOutput]:
        """The last output of every prompt, with all its answers."""
        finished: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs(requests)) as outputs:
            async for prompt, output in outputs:
                finished[prompt] = output
        return [finished[prompt] for prompt in range(len(requests.engine_requests))]

    async def begin_stream(
        self, request: SamplingRequest, requests: EngineRequests, maker: ChunkMaker, receive: Receive
    ) -> AsyncGenerator[bytes, None]:
        """The stream of `stream`, which has not begun yet, so that a refusal is still an HTTP status of its own."""
        return self.stream(request, requests, maker, await self.begin_outputs(requests, receive))

    async def begin_outputs(self, requests: EngineRequests, receive: Receive) -> Outputs:
        """`outputs`; if the engine may still refuse the request, only when the first one is there."""
        outputs = self.outputs(requests)
        if requests.compiles:
            outputs = await run_until_disconnect(receive, _after_first(outputs))
        return outputs

    async def stream(
        self, request: SamplingRequest, requests: EngineRequests, maker: ChunkMaker, source: Outputs
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events: a chunk per output of `source`, the usage if asked for, then [DONE].

        An error after the first byte can no longer change the HTTP status: it becomes an event.
        """
        counts = [0] * (len(requests.engine_requests) * requests.n)
        include_usage = request.include_usage or self.args.enable_force_include_usage
        continuous_usage = include_usage and request.continuous_usage
        hidden = WITH_THE_USAGE - {"usage"} if include_usage else WITH_THE_USAGE
        try:
            async with aclosing(source) as outputs:
                async for prompt, output in outputs:
                    for completion in output.outputs:
                        index = prompt * requests.n + completion.index
                        counts[index] += len(completion.token_ids)
                        for chunk in maker.chunks(index, completion):
                            if continuous_usage:
                                chunk.usage = requests.usage_of(index, counts[index])
                            yield _event(chunk.model_dump_json(exclude=hidden), requests.ids, prompt)
            if include_usage:
                last = maker.usage_chunk(requests.usage(counts))
                for hook in requests.hooks:
                    hook.response(last)
                yield _event(last.model_dump_json(), requests.ids)
        except Exception as error:
            yield _event(error_json(as_reported(error, requests.ids.response)), requests.ids)
        yield _event("[DONE]", requests.ids)


async def _after_first(flow: Outputs) -> Outputs:
    """The same flow, once its first item is there. Raises what the flow raises instead of one."""
    try:
        first = await anext(flow)
    except BaseException:
        await flow.aclose()
        raise

    async def go_on() -> Outputs:
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
