"""POST /v1/embeddings and /pooling (vllm/entrypoints/pooling: OpenAIServingEmbedding, OpenAIServingPooling)."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request

from stage02_server.api_server import Services
from stage02_server.features.pooling.protocol import (
    MAX_INPUTS,
    ClassificationData,
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingData,
    EmbeddingRequest,
    EmbeddingResponse,
    InputRequest,
    PoolingBase,
    PoolingData,
    PoolingRequest,
    PoolingResponse,
)
from stage02_server.features.several_prompts.collect import collect
from stage02_server.middleware import RequestIds
from stage02_server.protocol_response import UsageInfo
from stage02_server.serving_engine import Prompt, make_usage, require_task
from stage02_server.streaming import in_thread_if_long, made, run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.pooling_inputs import process_pooling_inputs
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.pooling_params import TOKEN_TASKS, PoolingParams
from stagetrace import trace

_HOW = {
    "embed": "serve a model with --runner pooling, or one with a classification head with --convert embed",
    "token_embed": "serve a model with --runner pooling, or one with a classification head with --convert embed",
    "score": "serve a model with --runner pooling, or one whose classification head has one class",
    "classify": "serve one with a classification head",
    "token_classify": "serve one with a classification head",
}
"""Task -> what would have it."""
MAX_NUMBERS = 2**22  # of one answer with a vector per token; as JSON they are about 80 MB


def vectors_of(output: RequestOutput) -> list[bytes]:
    """The vectors of a finished pooling request, each as the bytes of its float32 numbers; none if it was aborted."""
    return (output.result or {}).get("pooled", [])


def numbers(vector: bytes) -> list[float]:
    """The float32 numbers of a vector."""
    return array("f", vector).tolist()


class PoolingBatches:
    """What embeddings, pooling, classes and scores share: many prompts in, their vectors out.

    `template` turns a chat into a prompt, or a query and a document.
    """

    def __init__(self, services: Services) -> None:
        self.engine_client, self.models, self.template = services.engine, services.models, services.template
        self.added = services.added

    def check(self, request: PoolingBase, task: str) -> str:
        """The model name to answer with. Raises every refusal that does not depend on its texts."""
        self.engine_client.check_health()
        require_task(self.engine_client.vllm_config, task, _HOW[task])
        model = self.models.check(request.model)
        request.check_built()
        return model

    def usage_of(self, outputs: list[RequestOutput]) -> UsageInfo:
        """Tokens of all prompts; nothing is generated."""
        usage = make_usage(sum(len(output.prompt_token_ids) for output in outputs), 0)
        for add in self.added.usage:
            add(usage, sum(output.num_cached_tokens for output in outputs))
        return usage

    def check_count(self, count: int, field: str) -> None:
        """Raises InvalidRequestError for more texts, or pairs of texts, than one request may hold."""
        if count > MAX_INPUTS:
            raise InvalidRequestError(f"At most {MAX_INPUTS} texts, got {count}.", field)

    async def run_inputs(
        self, request: InputRequest, params: PoolingParams, raw_request: Request, model: str
    ) -> list[RequestOutput]:
        """The vectors of every `input`, or of a chat. Raises as `run` does."""
        special, inputs = request.add_special_tokens, request.prompts()
        if inputs is not None:
            prompts: list[tuple[str, Prompt]] = [("input", prompt) for prompt in inputs]
            return await self.run(request, prompts, params, raw_request, model, special is not False)
        messages = request.messages or []
        prompt = await run_until_disconnect(raw_request.receive, self.template.apply(messages, request))
        if trace.on:
            req = raw_request.state.ids.engine_id(0)
            trace.emit("request.templated", req=req, messages=len(messages), characters=len(prompt))
        special = self.template.adds_special_tokens(special)
        return await self.run(request, [("messages", prompt)], params, raw_request, model, special)

    async def run(
        self,
        request: PoolingBase,
        prompts: Sequence[tuple[str, Prompt]],
        params: PoolingParams,
        raw_request: Request,
        model: str,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """The vectors of all prompts, in their order. Each prompt comes with the field that it stands in.

        Raises InvalidRequestError before anything runs, ClientGoneError, EngineDeadError.
        """
        ids = raw_request.state.ids
        self.check_count(len(prompts), prompts[-1][0] if prompts else "input")
        if trace.on:
            trace.emit(
                "request.validated", req=ids.engine_id(0), model=model, stream=False, prompts=len(prompts)
            )  # fmt: skip
        texts = [part for _, prompt in prompts for part in (prompt if isinstance(prompt, tuple) else [prompt])]
        make = partial(self._requests, request, prompts, params, ids, add_special_tokens)
        requests = await in_thread_if_long(texts, raw_request.receive, make)
        self._check_size(requests, params)
        for admit in self.added.admit:
            admit(requests)
        for log in self.added.log:
            for engine_request, (_, prompt) in zip(requests, prompts, strict=True):
                log(engine_request, prompt)
        return await run_until_disconnect(raw_request.receive, collect(self.engine_client, requests))

    def _check_size(self, requests: list[EngineCoreRequest], params: PoolingParams) -> None:
        """Raises InvalidRequestError when a vector per token would be more than the answer may hold."""
        config = self.engine_client.vllm_config
        vector = len(config.shape.labels) if config.is_classifier else config.shape.hidden_size
        size = params.dimensions or config.pooling_config.dimensions or vector
        count = sum(len(request.prompt_token_ids) for request in requests)
        if params.task in TOKEN_TASKS and count * size > MAX_NUMBERS:
            raise InvalidRequestError(
                f"A vector for each of {count} tokens would be {count * size} numbers; an answer holds at most {MAX_NUMBERS}.",
                "input",
            )

    def _requests(
        self,
        request: PoolingBase,
        prompts: Sequence[tuple[str, Prompt]],
        params: PoolingParams,
        ids: RequestIds,
        add_special_tokens: bool,
    ) -> list[EngineCoreRequest]:
        requests = []
        for index, (field, prompt) in enumerate(prompts):
            try:
                made = process_pooling_inputs(
                    self.engine_client.input_processor,
                    ids.engine_id(index),
                    prompt,
                    params,
                    add_special_tokens=add_special_tokens,
                    truncate_prompt_tokens=request.truncate_prompt_tokens,
                    truncation_side=request.truncation_side,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                )
            except InvalidRequestError as error:  # each route has its own name for a text
                if error.param not in ("input", "prompt"):
                    raise
                text = str(error)
                shown = field + text.removeprefix("prompt") if text.startswith("prompt ") else text
                raise InvalidRequestError(shown, field) from None
            requests.append(made)
        return requests


class ServingPooling(PoolingBatches):
    """Vectors of texts."""

    async def create_embedding(self, request: EmbeddingRequest, raw_request: Request) -> EmbeddingResponse:
        """One vector per input."""
        created, model, outputs = await self._vectors(request, "embed", raw_request)

        def make(outputs: list[RequestOutput]) -> EmbeddingResponse:
            data = []
            for index, output in enumerate(outputs):
                (vector,) = vectors_of(output)
                shown = _base64([vector]) if request.encoding_format == "base64" else numbers(vector)
                data.append(EmbeddingData(index=index, embedding=shown))
            response_id, usage = raw_request.state.ids.response, self.usage_of(outputs)
            return EmbeddingResponse(id=response_id, created=created, model=model, data=data, usage=usage)

        return await made(make, outputs)

    async def create_pooling(self, request: PoolingRequest, raw_request: Request) -> PoolingResponse:
        """One vector per input, or one per token of it."""
        task = request.task_of(self.engine_client.vllm_config.supported_tasks)
        created, model, outputs = await self._vectors(request, task, raw_request)

        def make(outputs: list[RequestOutput]) -> PoolingResponse:
            data = [
                PoolingData(index=index, data=_pooled(vectors_of(output), task, request.encoding_format))
                for index, output in enumerate(outputs)
            ]
            response_id, usage = raw_request.state.ids.response, self.usage_of(outputs)
            return PoolingResponse(id=response_id, created=created, model=model, data=data, usage=usage)

        return await made(make, outputs)

    async def _vectors(
        self, request: EmbeddingRequest, task: str, raw: Request
    ) -> tuple[int, str, list[RequestOutput]]:
        created, model = int(time.time()), self.check(request, task)
        return created, model, await self.run_inputs(request, request.to_pooling_params(task), raw, model)


def _base64(vectors: list[bytes]) -> str:
    return base64.b64encode(b"".join(vectors)).decode()


def _pooled(vectors: list[bytes], task: str, encoding_format: str) -> list[float] | list[list[float]] | str:
    if encoding_format == "base64":
        return _base64(vectors)
    return [numbers(vector) for vector in vectors] if task in TOKEN_TASKS else numbers(vectors[0])


class ServingClassification(PoolingBatches):
    """Labels for texts."""

    async def create_classify(self, request: ClassificationRequest, raw_request: Request) -> ClassificationResponse:
        """One label per input, and a probability per class. Of equal ones the first class wins."""
        created, model = int(time.time()), self.check(request, "classify")
        outputs = await self.run_inputs(request, request.to_pooling_params(), raw_request, model)
        labels = self.engine_client.vllm_config.shape.labels

        def make(outputs: list[RequestOutput]) -> ClassificationResponse:
            data = []
            for index, output in enumerate(outputs):
                (vector,) = vectors_of(output)
                probs = numbers(vector)
                label = labels[probs.index(max(probs))]
                data.append(ClassificationData(index=index, label=label, probs=probs, num_classes=len(probs)))
            response_id, usage = raw_request.state.ids.response, self.usage_of(outputs)
            return ClassificationResponse(id=response_id, created=created, model=model, data=data, usage=usage)

        return await made(make, outputs)
