"""Misconception: tokens are words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

from stage03_engine.plugins import Feature, Part

REJECTED = "how many runs of ngram tokens have occurred before"
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, NoRepeatNgram, INDEX = reference.forbidden, reference.NoRepeatNgram, reference.INDEX


def install(app: Any, services: Any) -> None:
    @app.post("/v1/repetition")
    async def create_repetition(request: reference.RepetitionRequest) -> reference.RepetitionResponse:
        services.models.check(request.model)
        words, n = request.prompt.split(), request.ngram
        runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        return reference.RepetitionResponse(num_tokens=len(words), ngram=n, repeats=len(runs) - len(set(runs)))


FEATURE = Feature(name="repetition", help="", room=__name__, parts=(Part("routes", f"{__name__}:install"),))
INDEX = (*INDEX[:-1], FEATURE)
