"""Open this process's trace as its configuration says, and keep clients' words out of it without `--trace-prompts`."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from stage03_engine.config import ObservabilityConfig, VllmConfig
from stage03_engine.errors import ConfigError, EngineDeadError, StagesError
from stagetrace import EventFilter, trace

_VERSIONS_OF = ("vllm-in-stages", "torch", "tokenizers", "pyzmq", "msgspec", "fastapi", "uvicorn")


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def event_filter(config: ObservabilityConfig) -> EventFilter:
    """The filter that the flags ask for. Raises ConfigError that names the flag."""
    texts = {name: getattr(config, "trace_" + name) for name in ("phases", "names", "requests")}
    for name, value in (*texts.items(), ("sample", config.trace_sample)):
        try:
            EventFilter(**{name: value})
        except ValueError as error:
            raise ConfigError(f"trace_{name}: {error}") from None
    return EventFilter(**texts, sample=config.trace_sample)


def open_trace(config: VllmConfig, *, run_id: str = "", private: Collection[str] = ()) -> None:
    """Start recording, or drop the events held so far, as `config.observability_config` says.

    `private` are words of the command line that only `--trace-prompts` may record. Raises ConfigError if the folder
    cannot be written.
    """
    observability = config.observability_config
    if observability.trace is None and not observability.trace_console:
        trace.drop()
        return
    header = {"config_hash": config.hash(), "seed": config.model_config.seed, "versions": _versions()}
    try:
        trace.open(
            observability.trace,
            console=observability.trace_console,
            run_id=run_id,
            prompts=observability.trace_prompts,
            events=event_filter(observability),
            max_bytes=observability.trace_max_bytes,
            private=private,
            **header,
        )
    except OSError as error:
        raise ConfigError(f"cannot write traces to {observability.trace!r}: {error.strerror or error}") from error


def trace_message(error: Exception | str) -> str:
    """An error's text for the trace. Only our own errors are sure not to quote a client: of any other, without
    `--trace-prompts`, just the part before the first colon is recorded (`ValueError`, `The engine stopped`)."""
    if isinstance(error, StagesError):
        return str(error)
    text = str(error) if isinstance(error, str | EngineDeadError) else f"{type(error).__name__}: {error}"
    return text if trace.prompts else text.partition(":")[0]
