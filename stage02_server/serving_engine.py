"""What completions and chats share: check, tokenize, ask, answer (vllm/entrypoints/generate/base/serving.py, GenerateBaseServing)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive

from stage02_server.errors import as_reported, error_json, not_found
from stage02_server.middleware import RequestIds
from stage02_server.protocol import SamplingRequest
from stage02_server.protocol_response import UsageInfo, write_chunk
from stage02_server.protocol_types import AnswerHook
from stage02_server.streaming import in_thread_if_long, made, run_until_disconnect, server_sent_event
from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.plugins import find, parts
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

if TYPE_CHECKING:
    from stage02_server.api_server import Services

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (number of the prompt, output)
Result = BaseModel | AsyncGenerator[bytes, None]  # the whole answer, or its events
Prompts = list[str | list[int]]
Prompt = str | list[int] | tuple[str, str]  # two texts: what a model that compares them reads as one
MAX_ANSWERS = 4096  # of one HTTP request with n or best_of above 1


@dataclass
class EngineRequests:
    """The engine requests that one HTTP request became, one per prompt; answer k of prompt p is number p * n + k."""

    ids: RequestIds
    model: str
    n: int
    engine_requests: list[EngineCoreRequest]
    hooks: list[AnswerHook] = field(default_factory=list)
    ends_with_usage: bool = False  # a stream
    num_tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # answer -> its tokens so far
    same: dict[str, Any] = field(default_factory=dict)  # `Additions.same`
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache, with --enable-prompt-tokens-details

    def received(self, prompt: int, output: RequestOutput) -> None:
        """Show the next output for a prompt to the features, and count its tokens."""
        for hook in self.hooks:
            hook.output(prompt, output)
        for answer in output.outputs:
            self.num_tokens[prompt * self.n + answer.index] += len(answer.token_ids)

    def usage(self) -> UsageInfo:
        """The usage of all prompts and answers."""
        return self.usage_of(range(len(self.engine_requests)), sum(self.num_tokens.values()))

    def usage_of(self, prompts: Iterable[int], completion_tokens: int) -> UsageInfo:
        """The usage of these prompts and of this many answer tokens."""
        prompt = sum(len(self.engine_requests[number].prompt_token_ids) for number in prompts)
        return make_usage(prompt, completion_tokens)


def make_usage(prompt: int, completion: int) -> UsageInfo:
    """From the numbers of prompt tokens and of answer tokens."""
    return UsageInfo(prompt_tokens=prompt, total_tokens=prompt + completion, completion_tokens=completion)


def require_task(config: VllmConfig, task: str, how: str) -> None:
    """Raises APIError 404 if the served model does not have the task; `how` says what to serve instead."""
    if task not in config.supported_tasks:
        raise not_found(f"This server's model has no {task} task: {how}.", "model")


@dataclass
class Additions:
    """What features add to all handlers, those that are made later too: each of them reads these lists at every request."""

    # Called when the prompts are known. May refuse them.
    admit: list[Callable[[list[EngineCoreRequest]], None]] = field(default_factory=list)
    # For answers that are generated: makes the feature's hook, or None if it adds nothing to this answer. May refuse it.
    hooks: list[Callable[[EngineRequests, Prompts], AnswerHook | None]] = field(default_factory=list)
    # Called with each prompt that was admitted.
    log: list[Callable[[EngineCoreRequest, Prompt], None]] = field(default_factory=list)
    # Called with the usage of prompts, and how many of their tokens the prefix cache held.
    usage: list[Callable[[UsageInfo, int], None]] = field(default_factory=list)
    # Fields that every whole answer has alike, and the chunk of a stream that holds the usage.
    same: dict[str, Any] = field(default_factory=dict)


async def _of_one(requests: EngineRequests, flow: AsyncGenerator[RequestOutput, None]) -> Outputs:
    """The outputs of a request with one prompt: one switch of tasks for each."""
    async with aclosing(flow):
        async for output in flow:
            requests.received(0, output)
            yield 0, output


async def _of_several(requests: EngineRequests, merged: Outputs) -> Outputs:
    async with aclosing(merged):
        async for prompt, output in merged:
            requests.received(prompt, output)
            yield prompt, output


class AnswerMaker:
    """Engine outputs in one of OpenAI's shapes: whole, or as the chunks of a stream."""

    whole_class: ClassVar[type[BaseModel]]
    last_class: ClassVar[type[BaseModel]]  # of the chunk that holds the usage
    chunk_class: ClassVar[Any]  # of all others: `streamed(last_class)`

    def __init__(self, requests: EngineRequests) -> None:
        self.requests = requests
        self._same = {"id": requests.ids.response, "created": int(time.time()), "model": requests.model}
        self._begun: set[int] = set()  # answers
        self._buffer = bytearray()  # the JSON of the chunk that was written last
        self._chunk = self.chunk_class(**self._same, choices=[None])
        if requests.ends_with_usage:
            self._chunk.usage = None

    def choice(self, index: int, output: CompletionOutput) -> BaseModel:
        """The whole answer `index`."""
        raise NotImplementedError

    def pieces(self, index: int, output: CompletionOutput) -> list[msgspec.Struct]:
        """What `output` adds to answer `index`, as choices, each for its own chunk."""
        raise NotImplementedError

    def add_features(self, index: int, choice: BaseModel | msgspec.Struct, output: CompletionOutput) -> None:
        """Let the features add their part to a choice."""
        first = index not in self._begun
        self._begun.add(index)
        for hook in self.requests.hooks:
            hook.choice(index, choice, output, first)

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """The answer, with all choices."""
        n = self.requests.n
        numbered = [(p * n + answer.index, answer) for p, output in enumerate(outputs) for answer in output.outputs]
        return self._with_usage(self.whole_class, [self.choice(index, answer) for index, answer in numbered])

    def chunks(self, prompt: int, outputs: list[RequestOutput]) -> list[bytes]:
        """What an output adds to the answers to a prompt, as one server-sent event for each chunk."""
        events, requests = [], self.requests
        for answer in outputs[0].outputs:
            index = prompt * requests.n + answer.index
            for piece in self.pieces(index, answer):
                self._chunk.choices[0] = piece
                chunk = self._shown_to_features(index, piece) if requests.hooks else self._chunk
                write_chunk(chunk, self._buffer)
                events.append(server_sent_event(self._buffer))
        return events

    def _shown_to_features(self, index: int, piece: msgspec.Struct) -> msgspec.Struct:
        """A chunk of its own for a piece: features may write into it."""
        chunk = copy(self._chunk)
        chunk.choices = [piece]
        for hook in self.requests.hooks:
            hook.chunk(index, chunk)
        return chunk

    def usage_chunk(self) -> BaseModel:
        """The chunk without choices that ends a stream with `include_usage`."""
        return self._with_usage(self.last_class, [])

    def _with_usage(self, kind: type[BaseModel], choices: list[BaseModel]) -> BaseModel:
        response = kind(**self._same, **self.requests.same, choices=choices, usage=self.requests.usage())
        for hook in self.requests.hooks:
            hook.response(response)
        return response


class OpenAIServing:
    """Base of the handlers that use the engine."""

    def __init__(self, services: Services) -> None:
        self.engine_client, self.models, self.args = services.engine, services.models, services.args
        self.added = services.added
        config = services.engine.vllm_config
        self.defaults = config.model_config.default_sampling_params or {}
        self._generates = "generate" in config.supported_tasks

    def check(self, request: SamplingRequest) -> str:
        """The model name to answer with. Raises every refusal that does not depend on the prompt."""
        self.engine_client.check_health()
        if not self._generates:
            how = "serve a model that writes text, without --runner pooling and --convert"
            require_task(self.engine_client.vllm_config, "generate", how)
        model = self.models.check(request.model, variants=True)
        request.check_built()
        return model

    def ids(self, request: SamplingRequest, raw_request: Request) -> RequestIds:
        """The ids of the request and of its answer."""
        ids: RequestIds = raw_request.state.ids.named(request.request_id)
        if trace.on and ids.response != raw_request.state.ids.response:
            trace.emit("request.named", req=ids.engine_id(0), response=ids.response)
        return ids

    def trace_validated(self, request: SamplingRequest, ids: RequestIds, model: str, num_prompts: int) -> None:
        """Trace that the request has a valid form."""
        if trace.on:
            req, stream = ids.engine_id(0), bool(request.stream)
            trace.emit("request.validated", req=req, model=model, stream=stream, prompts=num_prompts)

    async def tokenize(
        self,
        request: SamplingRequest,
        prompts: Prompts,
        params: SamplingParams,
        ids: RequestIds,
        model: str,
        receive: Receive,
        add_special_tokens: bool = True,
    ) -> EngineRequests:
        """Every prompt as a request of the engine, before a single byte of the answer is sent. Raises InvalidRequestError, and
        ClientGoneError if the client leaves while long prompts are tokenized."""
        params = self._settled(params, ids, model, len(prompts))
        process = partial(self._process, request, prompts, params, ids, add_special_tokens)
        made = await in_thread_if_long([*prompts, msgspec.msgpack.encode(params)], receive, process)
        requests = EngineRequests(ids, model, 1 if request.n is None else request.n, made, same=self.added.same)
        await self._add_features(request, requests, prompts, receive)
        return requests

    def _settled(self, params: SamplingParams, ids: RequestIds, model: str, num_prompts: int) -> SamplingParams:
        """The parameters with what the name of the model adds to them. Raises InvalidRequestError for too many answers."""
        if model in self.models.variants:
            params = msgspec.structs.replace(params, **self.models.variants[model])
        if trace.on:
            bound = self.engine_client.vllm_config.max_model_len if params.max_tokens is None else params.max_tokens
            req, temperature = ids.engine_id(0), params.temperature
            trace.emit("request.sampling_params", req=req, temperature=temperature, max_tokens=bound)
        if params.num_answers > 1 and num_prompts * params.num_answers > MAX_ANSWERS:
            counts = f"must be at most {MAX_ANSWERS}, got {params.num_answers} times {num_prompts}"
            raise InvalidRequestError(f"n (or best_of) times the number of prompts {counts}.", "n")
        return params

    def _process(
        self,
        request: SamplingRequest,
        prompts: Prompts,
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

    async def _add_features(
        self, request: SamplingRequest, requests: EngineRequests, prompts: Prompts, receive: Receive
    ) -> None:
        """What features add to the answers. They may refuse the request: raises APIError and InvalidRequestError."""
        for admit in self.added.admit:
            admit(requests.engine_requests)
        requests.hooks += [hook for make in self.added.hooks if (hook := make(requests, prompts)) is not None]
        for log in self.added.log:
            for engine_request, prompt in zip(requests.engine_requests, prompts, strict=True):
                log(engine_request, prompt)
        for feature in reversed(request.used_features()):  # in the order in which they apply to SamplingParams
            if (hook := await feature.hook(request, self, requests, prompts, receive)) is not None:
                requests.hooks.append(hook)

    def ask(self, request: SamplingRequest, requests: EngineRequests) -> Outputs:
        """(number of the prompt, output) until every answer is finished; the engine is asked when the first one is awaited. Raises
        InvalidRequestError, and while it is read EngineDeadError."""
        flows = [self._generate(request, made) for made in requests.engine_requests]
        if len(flows) == 1:
            return _of_one(requests, flows[0])
        if (merge := find("server", "merge")) is None:
            raise InvalidRequestError("prompt: this server was built without requests that have several.", "prompt")
        return _of_several(requests, merge(flows))

    def _generate(self, request: SamplingRequest, made: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None]:
        """The flow of answers to one prompt, which starts when it is read."""
        for feature in request.used_features():
            if (flow := feature.generate(request, self.engine_client, made)) is not None:
                return flow
        return self.engine_client.generate(made, made.sampling_params, made.request_id)

    async def answer(self, request: SamplingRequest, maker: AnswerMaker, outputs: Outputs, raw: Request) -> Result:
        """The whole answer, or its stream before the first byte: a refusal can still set the HTTP status."""
        if not request.stream:
            return await run_until_disconnect(raw.receive, self._whole(maker, outputs))
        outputs = await self.begin(maker.requests, outputs, raw.receive)
        for part in parts("server", "direct_stream"):
            if part.is_on(self.args):
                outputs = part.load()(self, maker, outputs, raw.scope)
        return self._stream(maker, outputs)

    async def begin(self, requests: EngineRequests, outputs: Outputs, receive: Receive) -> Outputs:
        """The same outputs, once no feature needs to wait any longer."""
        for hook in requests.hooks:
            outputs = await hook.begin(outputs, receive)
        return outputs

    async def _whole(self, maker: AnswerMaker, outputs: Outputs) -> BaseModel:
        """The whole answer, from the last output of every prompt."""
        finished: dict[int, RequestOutput] = {}
        async with aclosing(outputs):
            async for prompt, output in outputs:
                finished[prompt] = output
        return await made(maker.whole, [finished[prompt] for prompt in sorted(finished)])

    async def _stream(self, maker: AnswerMaker, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Server-sent events: a chunk per output, the usage if asked for, then [DONE].

        An error after the first byte can no longer change the HTTP status: it becomes an event.
        """
        requests, ids = maker.requests, maker.requests.ids
        try:
            async with aclosing(outputs):
                async for prompt, output in outputs:
                    chunks = partial(maker.chunks, prompt)  # long ones are made by features alone
                    events = await made(chunks, [output]) if requests.hooks else chunks([output])
                    for event in events:
                        if trace.on:
                            trace.emit("sse.chunk", req=ids.engine_id(prompt), cause=ids.cause, bytes=len(event))
                    yield b"".join(events)  # one write
            if requests.ends_with_usage:
                yield _event(maker.usage_chunk().model_dump_json(), ids)
        except Exception as error:
            yield _event(error_json(as_reported(error, ids.response)), ids)
        yield _event("[DONE]", ids)


def _event(data: str, ids: RequestIds) -> bytes:
    event = server_sent_event(data.encode())
    if trace.on:
        trace.emit("sse.chunk", req=ids.engine_id(0), cause=ids.cause, bytes=len(event))
    return event
