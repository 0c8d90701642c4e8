"""Completions whose prompts are embeddings: their bytes are counted before they are decoded, and until the answer is complete."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request

from stage02_server.api_server import Services
from stage02_server.features.held_bytes.held import HeldBytes
from stage02_server.protocol import CompletionRequest
from stage02_server.serving_completion import OpenAIServingCompletion
from stage02_server.serving_engine import Result


def install(app: FastAPI, services: Services) -> None:
    """Completions go through the handler that counts."""
    app.state.openai_serving_completion = CountingCompletion(services)


class CountingCompletion(OpenAIServingCompletion):
    """Takes the place of the handler of completions. One with a prompt of text takes the same way as ever."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.held = HeldBytes("prompt_embeds", services.args.max_held_embeds_bytes, "--max-held-embeds-bytes")

    async def create_completion(self, request: CompletionRequest, raw_request: Request) -> Result:
        """As ever. Raises APIError 429 if there is no room for so many embeddings: each answer of `n` has its own in the engine."""
        answers = max(request.n or 1, getattr(request, "best_of", None) or 1)
        size = request.embeds_bytes * answers
        if not size:
            return await super().create_completion(request, raw_request)
        with self.held.hold(size) as hold:
            result = await super().create_completion(request, raw_request)
            if not isinstance(result, BaseModel):  # a stream has only begun
                hold.pass_on(result)
        return result
