"""Open this process's trace, and keep clients' words out of it without `--trace-prompts`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, StagesError
from stage03_engine.mixins import load
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace
from stagetrace.redact import HIDDEN


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


DERIVED = ("num_answers", "num_likely_tokens")
"""Sampling parameters that follow from others."""


def traced_params(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that differ from their defaults. Numbers and switches are shown; whatever may hold a client's
    words or tokens (stop strings, bad words, a grammar, a bias) only with `--trace-prompts`."""
    defaults, values = SamplingParams(), msgspec.to_builtins(params)
    changed = [name for name in values if getattr(params, name) != getattr(defaults, name)]
    given = {name: values[name] for name in changed if name not in DERIVED}
    if trace.prompts:
        return given
    return {name: value if isinstance(value, int | float) else HIDDEN for name, value in given.items()}
