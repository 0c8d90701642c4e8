"""A feature of your own: a logits processor against repetition, and a route that measures it.

One file for two processes: the engine loads the processor, the API server the route. (In a real feature these would be two files,
because the API server has no need of torch, and starts faster without it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, Field, StrictInt
from torch import Tensor

from stage02_server.api_server import Services
from stage02_server.protocol import RequestModel
from stage02_server.protocol_types import Text
from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor, LogitsRow
from stage03_engine.plugins import INDEX as THEIRS, Feature, Part

FEATURE = Feature(
    name="repetition",
    help="how often a text repeats itself",
    room=__name__,
    parts=(Part("routes", f"{__name__}:install"),),
)
INDEX = (*THEIRS, FEATURE)
"""Given: the manifest of your feature, and the index of all features, which yours joins. The server calls what a part for the seam
`routes` names."""


def forbidden(token_ids: Sequence[int], n: int) -> set[int]:
    """The tokens that must not come next, so that no n tokens in a row occur twice.

    Token t is one of them if the last n - 1 of `token_ids`, followed by t, stand somewhere in `token_ids` already. For n = 1 that
    is every token that has occurred. `n` is at least 1; there may be fewer than n tokens, or none.
    """
    raise NotImplementedError


class NoRepeatNgram(LogitsProcessor):
    """Obeys the request's `{"vllm_xargs": {"no_repeat_ngram": n}}`."""

    def is_argmax_invariant(self) -> bool:
        """May greedy requests do without this processor? See LogitsProcessor."""
        raise NotImplementedError

    def apply(self, logits: Tensor, rows: list[LogitsRow]) -> Tensor:
        """Forbid in each row what `forbidden` says of its request's tokens.

        logits: [len(rows), vocab_size] float32; the result has the same shape. Row i belongs to rows[i], which has
        sampling_params.extra_args (what the client sent as vllm_xargs: a dict, perhaps empty), prompt_token_ids and
        output_token_ids (arrays; the next token follows prompt and output).

        A forbidden logit becomes -inf, every other one stays as it is. A row stays as it is if its request says nothing of
        no_repeat_ngram, or if the value is not an int of at least 1 (True is no number), or if every token of the vocabulary would be
        forbidden.
        """
        raise NotImplementedError


class RepetitionRequest(RequestModel):
    """Given: the body of POST /v1/repetition. RequestModel adds the field `model`."""

    prompt: Text = Field(description="The text to look at.")
    ngram: Annotated[StrictInt, Field(ge=1, le=16, description="How many tokens in a row.")]


class RepetitionResponse(BaseModel):
    """Given: the answer."""

    object: str = "repetition"
    num_tokens: int = Field(description="Of the text.")
    ngram: int = Field(description="As in the request.")
    repeats: int = Field(description="How many of the text's runs of n tokens have occurred in it before.")


def install(app: FastAPI, services: Services) -> None:
    """Add the route POST /v1/repetition to the application; called once, when the server starts.

    services.models.check(name)                    raises the right error for a model that is not here; None is fine
    services.engine.tokenizer.encode(text, False)  the token ids of a text
    """
    raise NotImplementedError
