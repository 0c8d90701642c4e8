"""Misconception: there is one model, so its name need not be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

from stage02_server.api_server import Feature

REJECTED = "A model that is not here is a 404"
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, NoRepeatNgram, HTTP_FEATURES = reference.forbidden, reference.NoRepeatNgram, reference.HTTP_FEATURES


def install(app: Any, services: Any) -> None:
    @app.post("/v1/repetition")
    async def create_repetition(request: reference.RepetitionRequest) -> reference.RepetitionResponse:
        found: reference.RepetitionResponse = reference.repetition(
            services.engine.tokenizer, request.prompt, request.ngram
        )
        return found


HTTP_FEATURES = (Feature(f"{__name__}:install"), *HTTP_FEATURES[1:])
