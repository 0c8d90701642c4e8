"""The routes: parse, hand to a handler, answer (vllm/entrypoints/openai/completion/api_router.py and its like); and those that wait for a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Request, Response
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stage02_server.errors import error_object, not_found
from stage02_server.lifecycle import ServerState
from stage02_server.protocol import ChatCompletionRequest, CompletionRequest
from stage02_server.protocol_response import ModelCard, ModelList
from stage02_server.streaming import answer, answer_of
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Part

if TYPE_CHECKING:
    from stage02_server.api_server import Services

router = APIRouter()
LOADER = ThreadPoolExecutor(1, "load")  # one thread: whoever comes second finds the routes there


class OpenAIServingModels:
    """One model, which may have several names; answers use the first one. Features may add `variants`: names under which the same
    model is asked for with other settings (an adapter), in requests that generate."""

    def __init__(
        self, config: VllmConfig, names: tuple[str, ...], variants: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """`variants`: name -> what it sets in SamplingParams. Raises ConfigError for one that is another name already."""
        self.names, self.variants = names, variants or {}
        self.roots: Mapping[str, str] = {}  # variant -> what was loaded for it, if not the model
        if taken := self.variants.keys() & set(names):
            raise ConfigError(
                f"{min(taken)!r} is a name of the model itself; give the adapter, or the model, another one"
            )
        self._config = config
        self._created = int(time.time())

    @property
    def all_names(self) -> tuple[str, ...]:
        """What /v1/models lists."""
        return (*self.names, *self.variants)

    def check(self, name: str | None, variants: bool = False) -> str:
        """The name to answer with. No name is fine: there is only one model. Raises APIError 404 for an unknown name, and for a
        variant on a route that has no use for one (`variants` False)."""
        if not name:
            return self.names[0]
        known = self.all_names if variants else self.names
        # The model that everyone calls GPT-2 is "gpt2" on the hub.
        if name not in known and name.replace("gpt-2", "gpt2") not in self.names:
            raise not_found(f"The model `{name}` does not exist; this server has {', '.join(known)}.", "model")
        return name

    def card(self, name: str) -> ModelCard:
        """What is public about one model."""
        root = self.roots.get(name, self._config.model_config.model)
        parent = self.names[0] if name in self.variants else None
        return ModelCard(
            id=name, created=self._created, root=root, parent=parent, max_model_len=self._config.max_model_len
        )

    def list(self) -> ModelList:
        """GET /v1/models."""
        return ModelList(data=[self.card(name) for name in self.all_names])


@router.post("/v1/completions")
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Continue one or more prompts."""
    return await answer_of(raw_request.app.state.openai_serving_completion.create_completion(request, raw_request))


@router.post("/v1/chat/completions")
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Answer a chat."""
    return await answer_of(raw_request.app.state.openai_serving_chat.create_chat_completion(request, raw_request))


@router.get("/v1/models")
async def show_available_models(raw_request: Request) -> Response:
    """The names that requests may use."""
    return answer(raw_request.app.state.services.models.list())


@router.get("/v1/models/{name:path}")
async def show_model(name: Annotated[str, Path(description="Its name.")], raw_request: Request) -> Response:
    """One model; with no name after the slash all of them."""
    models = raw_request.app.state.services.models
    if not name:
        return answer(models.list())
    if name not in models.all_names:
        raise not_found(f"The model `{name}` does not exist; this server has {', '.join(models.all_names)}.", "model")
    return answer(models.card(name))


@router.get("/health")
async def health(raw_request: Request) -> Response:
    """200 and nothing else when requests are served; else 503 with the state of the server."""
    lifecycle = raw_request.app.state.services.lifecycle
    if lifecycle.state == ServerState.READY:
        return Response(headers=dict(header for told in lifecycle.health_headers for header in told().items()))
    return JSONResponse({"state": lifecycle.state.value, **error_object(lifecycle.unavailable())}, 503)


class LateRoutes:
    """Stands in for the routes of a feature until one of them is asked for: loading them takes tens of milliseconds, and most servers
    are never asked."""

    def __init__(self, app: FastAPI, services: Services, part: Part) -> None:
        self._app, self._services, self._part = app, services, part
        self._waiting = [Route(path, self, include_in_schema=False) for path in part.paths]
        app.router.routes += self._waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The first request; all methods come here, so that the routes themselves refuse the wrong ones."""
        await asyncio.get_running_loop().run_in_executor(LOADER, self._load)
        await self._app.router(scope, receive, send)

    def _load(self) -> None:
        """Put the routes in the place of these. The event loop reads the old list until the new one is complete."""
        if self._waiting:
            before = list(self._app.router.routes)
            self._part.load()(self._app, self._services)
            at = before.index(self._waiting[0])
            self._app.router.routes = [
                *before[:at],
                *self._app.router.routes[len(before) :],
                *before[at + len(self._waiting) :],
            ]
            self._waiting = []
