"""Misconception: there is one model, so its name need not be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

from stage03_engine.plugins import Feature, Part

REJECTED = "A model that is not here is a 404"
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, NoRepeatNgram, INDEX = reference.forbidden, reference.NoRepeatNgram, reference.INDEX


def install(app: Any, services: Any) -> None:
    @app.post("/v1/repetition")
    async def create_repetition(request: reference.RepetitionRequest) -> reference.RepetitionResponse:
        found: reference.RepetitionResponse = reference.repetition(
            services.engine.tokenizer, request.prompt, request.ngram
        )
        return found


FEATURE = Feature(name="repetition", help="", room=__name__, parts=(Part("routes", f"{__name__}:install"),))
INDEX = (*INDEX[:-1], FEATURE)
