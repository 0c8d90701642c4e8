"""Request fields of sampling that few requests need."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="sampling",
    help="request fields of sampling: penalties, biases, min_p, stop_token_ids, bad_words, ...",
    room=__package__,
    parts=(Part("request", ".fields:SamplingFields", key="SamplingRequest"),),
)
