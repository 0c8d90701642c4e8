"""`--enable-log-requests`: a log line per prompt (vllm/entrypoints/serve/utils/request_logger.py, RequestLogger)."""

from __future__ import annotations

import logging

import msgspec
from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.serving_engine import Prompt
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.params.pooling_params import PoolingParams
from stage03_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class RequestLogger:
    """Logs engine requests: at most `max_log_len` characters of a prompt and as many token ids; None: all."""

    def __init__(self, max_log_len: int | None) -> None:
        self._max_log_len = max_log_len

    def log_inputs(self, request: EngineCoreRequest, prompt: Prompt) -> None:
        """One line: %r keeps a prompt with line breaks from looking like several."""
        whole = "\n".join(prompt) if isinstance(prompt, tuple) else prompt
        text = None if isinstance(whole, list) else whole[: self._max_log_len]
        ids = request.prompt_token_ids[: self._max_log_len]
        logger.info(
            "Received request %s: prompt: %r, prompt_token_ids: %s, params: %s",
            request.request_id, text, ids, request.task if isinstance(request.task, PoolingParams) else _shown(request.sampling_params),
        )  # fmt: skip


def _shown(params: SamplingParams) -> SamplingParams:
    """Of bytes only how many: a prompt of embeddings has megabytes, which would be spelt out on the event loop."""
    values = {name: getattr(params, name) for name in params.__struct_fields__}
    sizes = {name: f"{len(value)} bytes" for name, value in values.items() if isinstance(value, bytes)}
    return msgspec.structs.replace(params, **sizes) if sizes else params


def install(app: FastAPI, services: Services) -> None:
    """Log the prompts that all handlers send to the engine."""
    services.added.log.append(RequestLogger(services.args.max_log_len).log_inputs)
