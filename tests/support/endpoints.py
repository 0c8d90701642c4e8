"""Every endpoint that gives a model work: a request for it, and a configuration of a model that it is served with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from server_under_test import InProcessServer, byte_config
from small_whisper import sound, whisper_folder

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.pooling.manifest import PoolingConfig


def makes_vectors() -> VllmConfig:
    return replace(byte_config(), pooling_config=PoolingConfig(runner_type="pooling"))


def makes_classes() -> VllmConfig:
    config = byte_config()
    shape = replace(config.shape, architecture="GPT2ForSequenceClassification", labels=("no", "yes"))
    classes = PoolingConfig(runner_type="pooling", convert_type="classify")
    return replace(config, model_config=replace(config.model_config, shape=shape), pooling_config=classes)


WHISPER = TemporaryDirectory(prefix="whisper-")  # goes with the process


@cache
def hears() -> VllmConfig:
    return EngineArgs.from_kwargs(model=str(whisper_folder(Path(WHISPER.name))))


@dataclass(frozen=True)
class Endpoint:
    """`body` is JSON, or the fields of a form with a file of sound. `streams`: it takes `stream`."""

    config: Callable[[], VllmConfig]
    body: dict[str, Any]
    streams: bool = False
    files: dict[str, bytes] = field(default_factory=dict)

    def content(self, **changes: Any) -> dict[str, Any]:
        """As httpx takes it."""
        body = self.body | changes
        return {"data": body, "files": self.files} if self.files else {"json": body}

    def raw(self, **changes: Any) -> httpx.Request:
        """The bytes and headers of such a request."""
        request = httpx.Request("POST", "http://test", **self.content(**changes))
        request.read()
        return request


CHAT = {"model": "byte-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
PAIR, DOCUMENTS = {"text_1": "x", "text_2": "y"}, {"query": "x", "documents": ["y"]}
SOUND = {"file": sound(0.1)}
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/completions": Endpoint(byte_config, {"prompt": "x", "max_tokens": 3, "n": 2, "temperature": 1}, True),
    "/v1/chat/completions": Endpoint(byte_config, CHAT, True),
    "/v1/messages": Endpoint(byte_config, CHAT, True),
    "/v1/responses": Endpoint(byte_config, {"input": "x", "max_output_tokens": 3}, True),
    "/v1/embeddings": Endpoint(makes_vectors, {"input": ["x", "y"]}),
    "/pooling": Endpoint(makes_vectors, {"input": "x"}),
    "/classify": Endpoint(makes_classes, {"input": "x"}),
    **{path: Endpoint(makes_vectors, PAIR) for path in ("/score", "/v1/score")},
    **{path: Endpoint(makes_vectors, DOCUMENTS) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    "/v1/audio/transcriptions": Endpoint(hears, {"language": "en"}, True, SOUND),
    "/v1/audio/translations": Endpoint(hears, {"language": "en"}, True, SOUND),
}


def ask(server: InProcessServer, path: str, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    return server.request("POST", path, headers=headers, **ENDPOINTS[path].content(**changes))
