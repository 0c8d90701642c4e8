"""GET /tokenizer_info (vllm/entrypoints/serve/tokenize, TokenizerInfo): what a client needs to tokenize by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from tokenizers import AddedToken

from stage02_server.api_server import Services
from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import read_json
from stage03_engine.plugins import loaded

router = APIRouter()
PATHS = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
"""Settings that may name folders of this machine."""


def tokenizer_info(services: Services) -> dict[str, Any]:
    """tokenizer_config.json, and what it leaves to tokenizer.json or to `--chat-template`. Raises ConfigError."""
    tokenizer, folder = services.engine.tokenizer, services.engine.vllm_config.model_config.tokenizer_path
    path = None if folder is None else Path(folder) / "tokenizer_config.json"
    found = read_json(path) if path is not None and path.exists() else {}
    found = {name: value for name, value in found.items() if name not in PATHS}
    found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if not tokenizer.makes_text:
        raise ConfigError("enable_tokenizer_info_endpoint shows the tokenizer, which skip_tokenizer_init leaves out")
    added = tokenizer.backend.get_added_tokens_decoder()
    found["added_tokens_decoder"] = {str(token_id): _described(token) for token_id, token in sorted(added.items())}
    given = [read(services.args.chat_template) for read in loaded("server", "load_chat_template")]
    if template := next(filter(None, [*given, tokenizer.chat_template]), None):
        found["chat_template"] = template
    return found


def _described(token: AddedToken) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


@router.get("/tokenizer_info")
async def get_tokenizer_info(raw_request: Request) -> dict[str, Any]:
    """The tokenizer's settings as in its tokenizer_config.json; only with --enable-tokenizer-info-endpoint."""
    info: dict[str, Any] = raw_request.app.state.tokenizer_info
    return info


def install(app: FastAPI, services: Services) -> None:
    """Add the route. Raises ConfigError."""
    app.state.tokenizer_info = tokenizer_info(services)
    app.include_router(router)
