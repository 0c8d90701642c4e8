"""Open this process's trace as its configuration says."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from stage03_engine import __version__
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.recording.manifest import event_filter
from stage03_engine.errors import ConfigError
from stagetrace import trace

_VERSIONS_OF = ("torch", "tokenizers", "pyzmq", "msgspec", "fastapi", "uvicorn")


def _versions() -> dict[str, str]:
    found = {"vllm-in-stages": __version__}
    for name in _VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def open_trace(config: VllmConfig, run_id: str, private: Collection[str]) -> None:
    """See stage03_engine/tracing.py."""
    observability = config.observability_config
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
