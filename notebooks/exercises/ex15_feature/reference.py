"""A logits processor against repetition, and a route that measures it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, StrictInt
from torch import Tensor

from stage02_server.api_server import Services
from stage02_server.protocol import RequestModel
from stage02_server.protocol_types import Text
from stage02_server.streaming import answer_of, in_thread_if_long
from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor, LogitsRow
from stage03_engine.plugins import INDEX as THEIRS, Feature, Part

FEATURE = Feature(
    name="repetition",
    help="how often a text repeats itself",
    room=__name__,
    parts=(Part("routes", f"{__name__}:install"),),
)
INDEX = (*THEIRS, FEATURE)


def forbidden(token_ids: Sequence[int], n: int) -> set[int]:
    """The tokens that would repeat n tokens in a row."""
    tokens = list(token_ids)
    last = tokens[len(tokens) - n + 1 :]  # n - 1 of them; if there are fewer, no run is long enough either
    return {tokens[i + n - 1] for i in range(len(tokens) - n + 1) if tokens[i : i + n - 1] == last}


class NoRepeatNgram(LogitsProcessor):
    """Obeys the request's `{"vllm_xargs": {"no_repeat_ngram": n}}`."""

    def is_argmax_invariant(self) -> bool:
        """It forbids the likeliest token, too."""
        return False

    def apply(self, logits: Tensor, rows: list[LogitsRow]) -> Tensor:
        """-inf for each forbidden token."""
        logits = logits.clone()
        for number, row in enumerate(rows):
            n = row.sampling_params.extra_args.get("no_repeat_ngram")
            if type(n) is int and n >= 1:
                tokens = [*row.prompt_token_ids.tolist(), *row.output_token_ids.tolist()]
                banned = list(forbidden(tokens, n))
                if len(banned) < logits.shape[1]:
                    logits[number, banned] = float("-inf")
        return logits


class RepetitionRequest(RequestModel):
    """POST /v1/repetition."""

    prompt: Text
    ngram: Annotated[StrictInt, Field(ge=1, le=16)]


class RepetitionResponse(BaseModel):
    """Its answer."""

    object: str = "repetition"
    num_tokens: int
    ngram: int
    repeats: int


def repetition(tokenizer: Any, text: str, n: int) -> RepetitionResponse:
    """Count the runs of n tokens that have occurred before."""
    tokens = tokenizer.encode(text, False)
    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return RepetitionResponse(num_tokens=len(tokens), ngram=n, repeats=len(runs) - len(set(runs)))


def install(app: FastAPI, services: Services) -> None:
    """Add the route."""

    @app.post("/v1/repetition")
    async def create_repetition(request: RepetitionRequest, raw_request: Request) -> Response:
        services.models.check(request.model)
        work = partial(repetition, services.engine.tokenizer, request.prompt, request.ngram)
        return await answer_of(in_thread_if_long([request.prompt], raw_request.receive, work))
