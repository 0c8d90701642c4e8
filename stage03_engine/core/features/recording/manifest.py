"""`--trace` and the flags that choose what is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature
from stagetrace import EventFilter
from stagetrace.writer import MIN_MAX_BYTES

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class Trace:
    """Part of ObservabilityConfig."""

    trace: str | None = option(None, "folder to write trace files to, one per process")
    trace_console: bool = option(False, "print [TRACE] lines to stderr")
    trace_phases: str | None = option(None, "record only events of these phases, such as 7,8")
    trace_names: str | None = option(None, "record only events whose name matches a pattern, such as 'sched.*,kv.*'")
    trace_requests: str | None = option(
        None,
        "record only requests whose id matches a pattern, such as 'cmpl-1f0c*', with the steps that they take part in",
    )
    trace_sample: float = option(
        1.0, "share of the requests that is recorded, such as 0.01: each with all its events, or not at all"
    )
    trace_max_bytes: int | None = option(
        None,
        "most bytes of trace files per process: the newest events and one older file are kept",
        at_least=MIN_MAX_BYTES,
    )
    trace_prompts: bool = option(
        False, "record what clients wrote and were answered too: prompts, outputs, token ids, stop strings"
    )


class RecordingFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError that names the flag."""
        event_filter(config.observability_config)

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """Each process opens its trace."""
        observed = config.observability_config
        on = observed.trace is not None or observed.trace_console
        return {"trace": ["stage03_engine.core.features.recording.open:open_trace"]} if on else {}


def event_filter(config: Any) -> EventFilter:
    """The filter that the flags ask for. Raises ConfigError that names the flag."""
    texts = {name: getattr(config, "trace_" + name) for name in ("phases", "names", "requests")}
    for name, value in (*texts.items(), ("sample", config.trace_sample)):
        try:
            EventFilter(**{name: value})
        except ValueError as error:
            raise ConfigError(f"trace_{name}: {error}") from None
    return EventFilter(**texts, sample=config.trace_sample)


FEATURE = Feature(
    name="recording",
    help="the trace of each process: `--trace`",
    room=__package__,
    settings={"ObservabilityConfig": Trace, "VllmConfig": RecordingFlags},
)
