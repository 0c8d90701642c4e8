"""Errors that cross the boundaries between the stages."""

from __future__ import annotations


class StagesError(Exception):
    """One line that says what is wrong and how to fix it: a command prints it without a traceback and exits with 2."""

    exit_code = 2


class ConfigError(StagesError):
    """A setting is impossible, alone or together with another."""


class ModelNotFoundError(StagesError):
    """The model is neither bundled, nor a folder, nor cached, and the hub does not provide it."""


class EngineStartError(StagesError):
    """The engine process could not start; the message is the engine's own."""

    exit_code = 1


class EngineDeadError(Exception):
    """The engine process is gone; every unfinished request gets this error (vllm/v1/engine/exceptions.py)."""


class InvalidRequestError(ValueError):
    """A request that cannot be served, with the field at fault (vLLM: VLLMValidationError)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BusyError(InvalidRequestError):
    """A request that could be served if it were sent again later."""
