"""vLLM's environment variables."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="vllm_variables",
    help="vLLM's environment variables, where there is a counterpart",
    room=__package__,
    parts=(
        Part("engine", ".variables:counterparts", key="other_variables"),
        Part("engine", ".variables:read_here", key="read_variables"),
        Part("engine", ".variables:multiprocessing_wanted", key="multiprocessing"),
    ),
)
