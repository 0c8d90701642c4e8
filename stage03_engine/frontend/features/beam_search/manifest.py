"""Beam search."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

_FIELDS = "stage02_server.features.beam_search.fields:BeamSearchFields"

FEATURE = Feature(
    name="beam_search",
    help="the likeliest whole answers, instead of sampled ones",
    room=__package__,
    also=("stage03_engine.params.beam_search", "stage02_server.features.beam_search"),
    parts=(
        Part("params", "stage03_engine.params.beam_search:Candidates"),
        Part("llm", ".beam_search:search_all", key="beam_search"),
        *(
            Part("request", _FIELDS, key=body)
            for body in ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest")
        ),
    ),
    events=("beam.finished", "beam.start", "beam.step"),
)
