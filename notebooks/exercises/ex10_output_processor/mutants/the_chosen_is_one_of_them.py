"""Misconception: the k likeliest are k entries; but the chosen token has one beside them, for it may not be among them."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token as reference
from stage02_server.features.logprobs.fields import CompletionLogProbs
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.messages import TokenLogprobs

REJECTED = "Every token has an entry in each of the four lists"


def add_token(
    result: CompletionLogProbs, texts: dict[int, str], position: TokenLogprobs, num_top: int, offset: int, as_ids: bool
) -> None:
    reference(result, texts, position, max(0, num_top - 1), offset, as_ids)
