"""One HTTP request with several prompts."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="several_prompts",
    help="several prompts in one request: their answers as one flow",
    room=__package__,
    parts=(Part("server", ".several_prompts:merge_async_iterators", key="merge"),),
)
