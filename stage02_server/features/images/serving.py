"""Chats with pictures (vllm/renderers/chat_utils/item_tracker.py, AsyncMultiModalItemTracker): they are loaded before the prompt is made, and put into
the engine's request after that."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request

from stage02_server.features.held_bytes.held import HeldBytes, Hold
from stage02_server.features.images.parts import images_of
from stage02_server.middleware import TENANT
from stage02_server.protocol import ChatCompletionRequest, ContentPart
from stage02_server.serving_chat import OpenAIServingChat
from stage02_server.serving_engine import EngineRequests, Prompts, Result
from stage02_server.streaming import run_until_disconnect
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.features.image_inputs import attach, check_count, places_of
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

if TYPE_CHECKING:
    from stage02_server.api_server import Services

MOST_COPIES = 64  # of images on their way to the engine, which gets them with each answer of `n`


def install(app: FastAPI, services: Services) -> None:
    """Chats go through the handler that knows pictures, and what other APIs make into chats asks it too. Raises ConfigError without Pillow."""
    if find_spec("PIL") is None:
        raise ConfigError("a model that sees needs Pillow; install the project with its extra `images`")
    app.state.openai_serving_chat = app.state.images = ServingChatWithImages(services)


class ServingChatWithImages(OpenAIServingChat):
    """Takes the place of the handler of chats. A chat without pictures takes the same way as ever."""

    def __init__(self, services: Services) -> None:
        from stage02_server.features.images.loader import ImageLoader

        super().__init__(services)
        self._config = services.engine.vllm_config
        self._shape = self._config.shape
        info = MULTIMODAL_REGISTRY.info(self._shape)
        self._placeholder, self._least_bytes = info.placeholder, info.least_bytes
        self._loader = ImageLoader(self._config)
        self._held = HeldBytes("images", self.args.max_held_image_bytes, "--max-held-image-bytes")

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Request) -> Result:
        """As without pictures. Those are loaded first. Raises InvalidRequestError, and APIError 429 if there is no room for so many."""
        if images_of(request.messages):
            self.check(request)
            await self.load(request, raw_request)
        return await super().create_chat_completion(request, raw_request)

    async def load(self, chat: ChatCompletionRequest, raw_request: Request) -> None:
        """Load its pictures, if it has any; of every API whose requests become chats. Raises as `create_chat_completion`."""
        if not (parts := images_of(chat.messages)):
            return
        copies = self._checked_copies(chat, len(parts))
        address, key = raw_request.client.host if raw_request.client else "", TENANT.get()
        client, ids = address if key is None else f"key {key}", getattr(raw_request.state, "ids", None)
        req = None if ids is None else ids.engine_id(0)  # what only counts tokens has none
        with self._held.hold(copies * len(parts) * self._least_bytes) as hold:
            await run_until_disconnect(raw_request.receive, self._load(parts, client, req, hold, copies))
            hold.pass_on(chat)

    def more_tokens(self, chat: ChatCompletionRequest) -> int:
        """How many more tokens its prompt has in the engine, where each picture takes as many as it has vectors."""
        pictures = [part.picture for part in images_of(chat.messages)]
        return sum(places_of(pictures, self._shape)) - len(pictures)

    def _checked_copies(self, request: ChatCompletionRequest, count: int) -> int:
        """How often the engine will hold each image: each answer of `n` has its own. Raises InvalidRequestError."""
        check_count(count, self._config, "messages")
        if getattr(request, "use_beam_search", False):
            raise InvalidRequestError(
                "use_beam_search: beams see no images; leave out one of the two.", "use_beam_search"
            )
        answers = max(request.n or 1, getattr(request, "best_of", None) or 1)
        if answers * count > MOST_COPIES:
            raise InvalidRequestError(
                f"n (or best_of) times the number of images must be at most {MOST_COPIES}, got {answers} times {count}.",
                "n",
            )
        return answers

    async def _load(self, parts: list[ContentPart], client: str, req: str | None, hold: Hold, copies: int) -> None:
        """Only decoding shows how large an image is to the model: from then on it counts at its real size."""
        size = len(parts) * self._least_bytes
        for number, part in enumerate(parts):
            started, url = time.monotonic(), part.url
            assert url is not None
            picture, fetched = await self._loader.load(url, client)
            size += len(picture.data) - self._least_bytes
            hold.become(copies * size)
            part.loaded(picture, self._placeholder, hold)
            if trace.on:
                trace.emit(
                    "image.loaded", req=req, image=number, bytes=len(picture.data), width=picture.file_width, height=picture.file_height,
                    seconds=round(time.monotonic() - started, 4), fetched=fetched,
                )  # fmt: skip

    async def tokenize(
        self, request: Any, prompts: Prompts, params: SamplingParams, *rest: Any, **more: Any
    ) -> EngineRequests:
        """As without pictures; the prompt has places for them, and the engine's request holds them. `chat` is what the request of
        another API has become."""
        parts = images_of(more.pop("chat", request).messages)
        pictures = [part.picture for part in parts]
        if pictures:
            params = msgspec.structs.replace(params, image_places=places_of(pictures, self._shape))
        requests = await super().tokenize(request, prompts, params, *rest, **more)
        for each in requests.engine_requests if pictures else ():
            parts[0].hold.pass_on(attach(each, pictures, self._shape))
        return requests
