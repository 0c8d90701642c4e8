"""Which tasks the served model has, and the refusal of the others (vLLM registers the routes of other tasks not at all)."""

from __future__ import annotations

from stage02_server.errors import APIError, not_found
from stage03_engine.config import VllmConfig

_HOW = {
    "generate": "serve a model that writes text, without --runner pooling and --convert",
    "embed": "serve a model with --runner pooling, or one with a classification head with --convert embed",
    "token_embed": "serve a model with --runner pooling, or one with a classification head with --convert embed",
    "score": "serve a model with --runner pooling, or one whose classification head has one class",
    "classify": "serve one with a classification head",
    "token_classify": "serve one with a classification head",
    "transcription": "serve a Whisper model",
    "translation": "serve a Whisper model",
}
"""Task -> what would have it."""


def no_task(task: str) -> APIError:
    """404: the served model cannot do this, whatever the request says."""
    return not_found(f"This server's model has no {task} task: {_HOW[task]}.", "model")


def require_task(config: VllmConfig, task: str) -> None:
    """Raises APIError 404 when the served model does not have the task."""
    if task not in config.supported_tasks:
        raise no_task(task)
