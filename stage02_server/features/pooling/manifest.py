"""Routes for vectors and classes."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="pooling_api",
    help="embeddings, scores, classification: /v1/embeddings, /pooling, /classify, /score, /rerank",
    room=__package__,
    parts=(Part("routes", ".routes:install", tasks=("embed", "classify")),),
    needs=("pooling", "several_prompts"),
)
