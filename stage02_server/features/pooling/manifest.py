"""Routes for vectors and classes."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

PATHS = {
    "/v1/embeddings": "embd-", "/pooling": "pool-", "/classify": "classify-", "/score": "score-", "/v1/score": "score-",
    "/rerank": "rerank-", "/v1/rerank": "rerank-", "/v2/rerank": "rerank-",
}  # fmt: skip

FEATURE = Feature(
    name="pooling_api",
    help="embeddings, scores, classification: /v1/embeddings, /pooling, /classify, /score, /rerank",
    room=__package__,
    parts=(Part("routes", ".routes:install", tasks=("embed", "classify"), paths=PATHS, late=True),),
    needs=("pooling", "several_prompts"),
    events=("request.templated", "request.validated"),
)
