"""Routes that vLLM has and that cannot apply here: each is a 404 that says why, instead of one that might mean a mistyped
address (vLLM does not register the routes of tasks that its model lacks).
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from stage02_server.api_server import REFUSED, Services
from stage02_server.errors import not_found
from stage02_server.serving_engine import require_task
from stage03_engine.mixins import is_there

_NO_DECISIONS = "its model writes text and has no {} task"
_NO_WEIGHT_UPDATES = "weights are replaced by the program that holds the engine (LLM.update_weights), not over HTTP"
_NO_EXPERTS = "no model here has experts; POST /scale_engines changes the number of engines"

ABSENT: dict[str, tuple[str, str]] = {
    # Other tasks, and other forms of the ones that exist
    "/v1/systemone": ("POST", _NO_DECISIONS.format("structured decision")),
    "/v1/decisions": ("POST", _NO_DECISIONS.format("decision")),
    "/generative_scoring": ("POST", "ask /v1/completions for logprobs, with echo and max_tokens 0 to score a text"),
    "/v1/chat/completions/batch": ("POST", "send one request per chat to /v1/chat/completions; they run together"),
    "/inference/v1/generate": ("POST", "send token ids as prompt to /v1/completions"),
    "/v1/realtime": ("GET", "its model writes text and has no realtime task"),
    # SageMaker's names for them
    "/invocations": ("POST", "send the body to the route that it is meant for, such as /v1/chat/completions"),
    "/ping": ("GET", "ask /health"),
    # The engine's internals
    "/kv_event_sources": ("GET", "events of the KV cache are not published; --trace records them"),
    "/scale_elastic_ep": ("POST", _NO_EXPERTS),
    "/is_scaling_elastic_ep": ("POST", _NO_EXPERTS),
    "/reset_mm_cache": ("POST", "images are prepared anew for each request, so there is no cache of them"),
    "/reset_encoder_cache": (
        "POST",
        "what the encoder made of an image makes room by itself; only the same image finds it",
    ),
    "/collective_rpc": ("POST", "calling methods of the engine by name is nothing to offer over HTTP"),
    "/init_weight_transfer_engine": ("POST", _NO_WEIGHT_UPDATES),
    "/update_weights": ("POST", _NO_WEIGHT_UPDATES),
}
"""Path -> its method, and why it is not here."""


TASKS: dict[str, tuple[str, str]] = {
    "/v1/responses": ("POST", "generate"),
    "/v1/responses/{response_id}": ("GET", "generate"),
    "/v1/responses/{response_id}/cancel": ("POST", "generate"),
    "/v1/messages": ("POST", "generate"),
    "/v1/messages/count_tokens": ("POST", "generate"),
    "/v1/embeddings": ("POST", "embed"),
    "/pooling": ("POST", "token_embed"),
    "/classify": ("POST", "classify"),
    **dict.fromkeys(["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"], ("POST", "score")),
    "/v1/audio/transcriptions": ("POST", "transcription"),
    "/v1/audio/translations": ("POST", "translation"),
}
"""Path -> its method, and the task that it needs. Its feature is not installed if the model lacks the task."""


_POOLING = "serve a model with --runner pooling, or one with a classification head with --convert embed"
HOW = {
    "generate": "serve a model that writes text, without --runner pooling and --convert",
    "embed": _POOLING,
    "token_embed": _POOLING,
    "score": "serve a model with --runner pooling, or one whose classification head has one class",
    "classify": "serve one with a classification head",
    "transcription": "serve a Whisper model",
    "translation": "serve a Whisper model",
}
"""Task -> what would have it."""


_DEV_MODE = "--server-dev-mode, or VLLM_SERVER_DEV_MODE=1"
_SLEEP = f"--enable-sleep-mode, and {_DEV_MODE}"
_ALONE = f"one API server, and {_DEV_MODE}"
_LORA = "--enable-lora, --lora-root FOLDER and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
OFF: dict[str, tuple[str, str]] = {
    "/tokenizer_info": ("GET", "--enable-tokenizer-info-endpoint"),
    # They show or change what is not the caller's.
    "/server_info": ("GET", _DEV_MODE),
    "/abort_requests": ("POST", _ALONE),
    "/reset_prefix_cache": ("POST", _DEV_MODE),
    "/sleep": ("POST", _SLEEP),
    "/wake_up": ("POST", _SLEEP),
    "/is_sleeping": ("GET", _SLEEP),
    "/v1/load_lora_adapter": ("POST", _LORA),
    "/v1/unload_lora_adapter": ("POST", _LORA),
    "/scale_engines": ("POST", f"--data-parallel-size 2 or more, {_ALONE}"),
}
"""Path -> its method, and the flag that switches it on."""


FEATURES: dict[str, tuple[str, ...]] = {
    "stage02_server.features.tokenize.tokenize": ("POST /tokenize", "POST /detokenize"),
    "stage02_server.features.admin.routes": (
        "GET /load", "GET /server_info", "POST /abort_requests", "POST /start_profile", "POST /stop_profile",
        "POST /reset_prefix_cache",
    ),
    "stage02_server.features.page.routes": (
        "GET /", "GET /v1/engine/events", "GET /docs", "GET /redoc", "GET /openapi.json",
    ),
}  # fmt: skip
"""Module of a feature -> its routes, which are refused if it is not there."""


async def refuse(raw_request: Request) -> Response:
    """Raises APIError 404, whatever the body says."""
    path = raw_request.scope["route"].path
    raise not_found(f"This server has no {path}: {ABSENT[path][1]}.")


async def refuse_task(raw_request: Request) -> Response:
    """Raises APIError 404, whatever the body says; EngineDeadError if the engine died."""
    services: Services = raw_request.app.state.services
    services.engine.check_health()
    path = raw_request.scope["route"].path
    task = TASKS[path][1]
    require_task(services.engine.vllm_config, task, HOW[task])
    raise not_found(f"This server has no {path}: the feature behind it is not installed.")


async def refuse_off(raw_request: Request) -> Response:
    """Raises APIError 404."""
    path = raw_request.scope["route"].path
    raise not_found(f"This server has no {path}: start it with {OFF[path][1]}.")


async def refuse_feature(raw_request: Request) -> Response:
    """Raises APIError 404."""
    raise not_found(f"This server has no {raw_request.scope['route'].path}: the feature behind it is not installed.")


def install(app: FastAPI, services: Services) -> None:
    """Add the refusals after all other routes."""
    for handler, routes in ((refuse, ABSENT), (refuse_task, TASKS), (refuse_off, OFF)):
        for path, (method, _) in routes.items():
            app.add_api_route(path, handler, methods=[method], include_in_schema=False, name=REFUSED)
    for module, routes_of_feature in FEATURES.items():
        for method, path in (route.split() for route in routes_of_feature if not is_there(module)):
            app.add_api_route(path, refuse_feature, methods=[method], include_in_schema=False, name=REFUSED)
