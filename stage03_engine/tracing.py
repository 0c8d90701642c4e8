"""Open this process's trace, and keep clients' words out of it without `--trace-prompts`."""

from __future__ import annotations

from collections.abc import Collection

from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, StagesError
from stage03_engine.mixins import load
from stagetrace import trace


def open_trace(config: VllmConfig, *, run_id: str = "", private: Collection[str] = ()) -> None:
    """Start recording, or drop the events held so far, as the flags say.

    Only `--trace-prompts` records the words of the command line in `private`. Raises ConfigError if the folder cannot be
    written.
    """
    recorders = config.hooks("trace")
    for recorder in recorders:
        load(recorder)(config, run_id, private)
    if not recorders:
        trace.drop()


def trace_message(error: Exception | str) -> str:
    """An error's text for the trace. Only our own errors never quote a client. Of any other, the trace holds only the part
    before the first colon (`ValueError`, `The engine stopped`), unless `--trace-prompts` is on."""
    if isinstance(error, StagesError):
        return str(error)
    text = str(error) if isinstance(error, str | EngineDeadError) else f"{type(error).__name__}: {error}"
    return text if trace.prompts else text.partition(":")[0]
