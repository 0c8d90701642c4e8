"""What /openapi.json says where FastAPI cannot know it: on fields, answers, error objects, and streams.

vLLM declares the same at each route; here it is one rule for all of them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import JSONResponse

from stage02_server.protocol_response import ErrorResponse
from stage02_server.routes import router
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import features

EMPTY = {"/health", "/reset_prefix_cache"}
"""Routes whose 200 has no body."""

STREAMED = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/{response_id}", "/v1/messages",
}  # fmt: skip
"""Routes that answer with server-sent events where the request asks for them."""

_WALK = "stage02_server.protocol_response"
_RESPONSES = "stage02_server.features.responses.protocol_output"
_MESSAGES = "stage02_server.features.messages.protocol_answer"
_POOLING = "stage02_server.features.pooling.protocol"
ANSWERS = {
    "/v1/completions": f"{_WALK}:CompletionResponse",
    "/v1/chat/completions": f"{_WALK}:ChatCompletionResponse",
    "/v1/responses": f"{_RESPONSES}:ResponsesResponse",
    "/v1/responses/{response_id}": f"{_RESPONSES}:ResponsesResponse",
    "/v1/responses/{response_id}/cancel": f"{_RESPONSES}:ResponsesResponse",
    "/v1/messages": f"{_MESSAGES}:AnthropicMessagesResponse",
    "/v1/messages/count_tokens": f"{_MESSAGES}:AnthropicCountTokensResponse",
    "/v1/models": f"{_WALK}:ModelList",
    "/tokenize": "stage02_server.features.tokenize.tokenize:TokenizeResponse",
    "/detokenize": "stage02_server.features.tokenize.tokenize:DetokenizeResponse",
    "/v1/embeddings": f"{_POOLING}:EmbeddingResponse",
    "/pooling": f"{_POOLING}:PoolingResponse",
    "/classify": f"{_POOLING}:ClassificationResponse",
    **dict.fromkeys(["/score", "/v1/score"], f"{_POOLING}:ScoreResponse"),
    **dict.fromkeys(["/rerank", "/v1/rerank", "/v2/rerank"], f"{_POOLING}:RerankResponse"),
}
"""What the JSON of a 200 looks like. The handlers encode it themselves, so FastAPI does not know it."""

OWN_ERRORS = {"/v1/messages": f"{_MESSAGES}:AnthropicErrorResponse"}
"""Beginning of a path -> the shape of its errors, where it is not OpenAI's."""

OTHER_TYPE = {
    "/metrics": "text/plain",
    "/v1/engine/events": "text/event-stream",
    **dict.fromkeys(["/v1/load_lora_adapter", "/v1/unload_lora_adapter"], "text/plain"),
}
"""Routes whose 200 is not JSON at all."""


GROUPS = {
    "": "Text",
    "responses": "Responses",
    "messages": "Messages",
    "audio": "Sound",
    "pooling": "Vectors, classes and scores",
    "tokenize": "Tokens",
    "tokenizer_info": "Tokens",
    "adapters": "Adapters",
    "page": "Watching",
    "admin": "Watching",
}
"""Room -> the group that its routes stand in; "" is the walk. The groups come in this order, then those of rooms that are not named."""
OF_ANOTHER_GROUP = {
    "/v1/models": "Models", "/v1/models/{name}": "Models", "/health": "Watching",
    "/start_profile": "Profiling", "/stop_profile": "Profiling",
}  # fmt: skip
"""Routes that stand in another group than their room's others."""

MOST_OF_A_NAME = 60  # characters; of a longer sentence its beginning is the name


def _group(module: str) -> str:
    """The group of a module with routes."""
    room = module.removeprefix("stage02_server.features.") if ".features." in module else ""
    name = room.partition(".")[0]
    return GROUPS.get(name, name.replace("_", " ").capitalize())


def describe() -> dict[str, Any]:
    """The description of all routes, even of those that the served model does not use. Imports all HTTP features."""
    app = FastAPI(title="vLLM in stages")
    modules = [
        import_module(part.module)
        for each in features("stage02_server")
        for part in each.parts
        if part.seam == "routes"
    ]
    app.include_router(router, tags=[_group("")])
    for module in modules:
        if hasattr(module, "router"):
            app.include_router(module.router, tags=[_group(module.__name__)])
    return _named(_described(app.openapi()))


def _named(description: dict[str, Any]) -> dict[str, Any]:
    """Each route in its group, under the first sentence of its docstring instead of the name of a function."""
    groups = dict.fromkeys(["Text", "Models", *GROUPS.values()])
    for path, operations in description["paths"].items():
        for operation in operations.values():
            said = " ".join(operation["description"].split())
            for end in (". ", "; ", ": ", " ("):
                said = said.partition(end)[0]
            operation["summary"] = (said if len(said) <= MOST_OF_A_NAME else said.partition(", ")[0]).rstrip(".")
            operation["tags"] = [OF_ANOTHER_GROUP.get(path, operation["tags"][0])]
            groups |= dict.fromkeys(operation["tags"])
    used = {tag for operations in description["paths"].values() for each in operations.values() for tag in each["tags"]}
    description["tags"] = [{"name": name} for name in groups if name in used]
    return description


def _described(description: dict[str, Any]) -> dict[str, Any]:
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    answers = _shapes_of_answers()
    schemas.update(answers)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape of an error, which no route sends
        schemas.pop(name, None)
    for path, operations in description["paths"].items():
        own = [shape.partition(":")[2] for begin, shape in OWN_ERRORS.items() if path.startswith(begin)]
        error = {"$ref": f"#/components/schemas/{(*own, 'ErrorResponse')[0]}"}
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = {
                "description": "An error object",
                "content": {"application/json": {"schema": error}},
            }
            if method == "delete":  # its route says what it answers
                continue
            if path in EMPTY:
                responses["200"].pop("content", None)
            answer = ANSWERS.get(path, "").partition(":")[2]
            if answer in answers:
                responses["200"]["content"]["application/json"]["schema"] = {"$ref": f"#/components/schemas/{answer}"}
            if path in STREAMED:
                responses["200"]["content"]["text/event-stream"] = {}
            if path in OTHER_TYPE:
                responses["200"]["content"] = {OTHER_TYPE[path]: {}}
    return description


def _there(*names: str) -> list[type[BaseModel]]:
    return [load(name) for name in names if is_there(name.partition(":")[0])]


def _shapes_of_answers() -> dict[str, Any]:
    """The JSON schemas of all answers and of what they hold, by name."""
    shapes: dict[str, Any] = {}
    models: tuple[type[BaseModel], ...] = (ErrorResponse, *_there(*ANSWERS.values(), *OWN_ERRORS.values()))
    for model in models:
        own = model.model_json_schema(ref_template="#/components/schemas/{model}")
        shapes.update(own.pop("$defs", {}))
        shapes[model.__name__] = own
    return shapes


def main(root_path: str) -> None:
    """Write the description to standard output, in UTF-8."""
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    sys.stdout.buffer.write(bytes(JSONResponse(describe() | servers).body))


if __name__ == "__main__":
    main(sys.argv[1])
