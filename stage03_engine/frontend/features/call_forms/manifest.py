"""The forms in which callers in Python give a prompt."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="call_forms",
    help="the forms of prompts that vLLM's Python API takes",
    room=__package__,
    parts=(
        Part("engine", ".call_forms:request_of", key="request_of"),
        Part("engine", ".call_forms:plain_prompt", key="plain_prompt"),
        Part("engine", ".call_forms:processed", key="processed"),
        Part("engine", ".call_forms:started", key="started"),
    ),
)
