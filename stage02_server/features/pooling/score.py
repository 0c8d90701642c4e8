"""POST /score and /rerank (vllm/entrypoints/pooling/scoring/serving.py, ServingScores): how well texts fit each other.

A model with one class is a cross-encoder: it reads both texts as one prompt, and what it says of the class is the score. The
tokenizer joins them, or the template of `--chat-template` with a query and a document as its messages (never the model's own,
which is for chats). For any other model a score is the cosine of two embeddings.
"""

from __future__ import annotations

import time
from functools import partial
from operator import mul

from starlette.requests import Request

from stage02_server.api_server import Services
from stage02_server.chat_template import ChatTemplate
from stage02_server.features.pooling.protocol import (
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    ScoreBase,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
)
from stage02_server.features.pooling.serving import PoolingBatches, numbers, vectors_of
from stage02_server.protocol import ChatMessageParam, ChatTemplateFields
from stage02_server.protocol_response import UsageInfo
from stage02_server.serving_engine import Prompt
from stage02_server.streaming import made, run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.pooling_params import PoolingParams

Side = tuple[str, list[str]]  # the name of the field, its texts


class ServingScores(PoolingBatches):
    """Compares texts. A template joins a query and a document if one was given with `--chat-template`."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._joins = services.args.chat_template is not None

    async def create_score(self, request: ScoreRequest, raw_request: Request) -> ScoreResponse:
        """A score per pair: of the one text with each of the others, or of two lists in step."""
        created, model = int(time.time()), self.check(request, "score")
        scores, usage = await self._scores(request, *request.sides(), raw_request, model)
        data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreResponse(id=raw_request.state.ids.response, created=created, model=model, data=data, usage=usage)

    async def do_rerank(self, request: RerankRequest, raw_request: Request) -> RerankResponse:
        """The documents in the order of their scores with the query; equal ones stay in the order of the request."""
        model = self.check(request, "score")
        if request.top_n < 0:
            raise InvalidRequestError(f"top_n must be at least 0 (0 = all), got {request.top_n}.", "top_n")
        if not request.documents:
            raise InvalidRequestError("documents must not be empty.", "documents")
        sides = ("query", [request.query]), ("documents", request.documents)
        scores, usage = await self._scores(request, *sides, raw_request, model)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
        results = [
            RerankResult(
                index=index,
                document=None if request.return_documents is False else RerankDocument(text=request.documents[index]),
                relevance_score=scores[index],
            )
            for index in order
        ]
        tokens = RerankUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)
        return RerankResponse(id=raw_request.state.ids.response, model=model, usage=tokens, results=results)

    async def _scores(
        self, request: ScoreBase, left: Side, right: Side, raw_request: Request, model: str
    ) -> tuple[list[float], UsageInfo]:
        if self.engine_client.vllm_config.is_classifier:
            return await self._scores_of_pairs(request, left, right, raw_request, model)
        if request.use_activation is False:
            raise InvalidRequestError(
                "This model's scores are cosines: there is no activation to leave out.", "use_activation"
            )
        prompts = [(name, text) for name, texts in (left, right) for text in texts]
        outputs = await self.run(request, prompts, PoolingParams(normalize=True), raw_request, model)
        return await made(partial(_cosines, len(left[1])), outputs), self.usage_of(outputs)

    async def _scores_of_pairs(
        self, request: ScoreBase, left: Side, right: Side, raw_request: Request, model: str
    ) -> tuple[list[float], UsageInfo]:
        """Each pair is one prompt."""
        for name, texts in (left, right):
            if "" in texts:
                raise InvalidRequestError(f"{name} must not hold an empty text.", name)
        ones, others = left[1], right[1]
        if len(ones) == 1:
            ones = ones * len(others)
        self.check_count(len(others), right[0])
        pairs: list[Prompt] = list(zip(ones, others, strict=True))
        if self._joins:
            pairs = await run_until_disconnect(raw_request.receive, _templated(self.template, ones, right))
        params = PoolingParams(task="classify", normalize=request.use_activation)
        outputs = await self.run(request, [(right[0], pair) for pair in pairs], params, raw_request, model)
        return [numbers(vectors_of(output)[0])[0] for output in outputs], self.usage_of(outputs)


def _cosines(num_ones: int, outputs: list[RequestOutput]) -> list[float]:
    """Of the first so many vectors with the others, in pairs; one goes with each of them."""
    vectors = [numbers(vectors_of(output)[0]) for output in outputs]
    ones, others = vectors[:num_ones], vectors[num_ones:]
    if len(ones) == 1:
        ones = ones * len(others)
    return [sum(map(mul, one, other)) for one, other in zip(ones, others, strict=True)]


async def _templated(template: ChatTemplate, ones: list[str], right: Side) -> list[Prompt]:
    """Each pair as the template writes it. Raises InvalidRequestError."""
    prompts: list[Prompt] = []
    for one, other in zip(ones, right[1], strict=True):
        messages = [ChatMessageParam(role="query", content=one), ChatMessageParam(role="document", content=other)]
        try:
            prompts.append(await template.apply(messages, ChatTemplateFields(add_generation_prompt=False)))
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), right[0]) from None
    return prompts
