"""Request fields that are vLLM's own, beside OpenAI's."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="sampling",
    help="request fields of vLLM's: min_p, stop_token_ids, bad_words, repetition_penalty, ...",
    room=__package__,
    parts=(Part("request", ".fields:SamplingFields", key="SamplingRequest"),),
)
