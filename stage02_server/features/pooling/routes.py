"""The routes about vectors and classes (vllm/entrypoints/pooling: embed, pooling, classify, scoring/api_router.py)."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response

from stage02_server.api_server import Services
from stage02_server.features.pooling.protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from stage02_server.features.pooling.score import ServingScores
from stage02_server.features.pooling.serving import ServingClassification, ServingPooling
from stage02_server.streaming import answer_of

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embedding(request: EmbeddingRequest, raw_request: Request) -> Response:
    """A vector for each text."""
    return await answer_of(raw_request.app.state.serving_pooling.create_embedding(request, raw_request))


@router.post("/pooling")
async def create_pooling(request: PoolingRequest, raw_request: Request) -> Response:
    """A vector for each token of each text."""
    return await answer_of(raw_request.app.state.serving_pooling.create_pooling(request, raw_request))


@router.post("/classify")
async def create_classify(request: ClassificationRequest, raw_request: Request) -> Response:
    """Which class each text belongs to."""
    return await answer_of(raw_request.app.state.serving_classification.create_classify(request, raw_request))


@router.post("/score")
@router.post("/v1/score")
async def create_score(request: ScoreRequest, raw_request: Request) -> Response:
    """How alike texts are."""
    return await answer_of(raw_request.app.state.serving_scores.create_score(request, raw_request))


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def do_rerank(request: RerankRequest, raw_request: Request) -> Response:
    """Documents in the order of how well they fit a query."""
    return await answer_of(raw_request.app.state.serving_scores.do_rerank(request, raw_request))


def install(app: FastAPI, services: Services) -> None:
    """Add the routes and their handlers."""
    app.state.serving_pooling = ServingPooling(services)
    app.state.serving_classification = ServingClassification(services)
    app.state.serving_scores = ServingScores(services)
    app.include_router(router)
