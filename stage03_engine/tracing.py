"""Open this process's trace according to its configuration."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stagetrace import trace

_VERSIONS_OF = ("vllm-in-stages", "torch", "tokenizers", "pyzmq", "msgspec", "fastapi", "uvicorn")


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def open_trace(config: VllmConfig, *, run_id: str = "") -> None:
    """Start recording (or switch off what was held) as `config.observability_config` says.

    Raises ConfigError when the folder cannot be written.
    """
    observability = config.observability_config
    if observability.trace is None and not observability.trace_console:
        trace.drop()
        return
    header = {"config_hash": config.hash(), "seed": config.model_config.seed, "versions": _versions()}
    try:
        trace.open(observability.trace, console=observability.trace_console, run_id=run_id, **header)
    except OSError as error:
        raise ConfigError(f"cannot write traces to {observability.trace!r}: {error.strerror or error}") from error
