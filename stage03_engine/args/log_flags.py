"""The flags of the log, a part of ObservabilityConfig; log.py acts on them."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option

LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")


@dataclass(frozen=True)
class LogFlags:
    """What the log holds."""

    log_level: str | None = option(
        None,
        "least level of our own lines in the log: INFO for a server, WARNING for other commands (vLLM: VLLM_LOGGING_LEVEL)",
        LEVELS,
    )
    log_config_file: str | None = option(
        None, "JSON file that sets up logging, in the form of Python's logging.config.dictConfig"
    )
    configure_logging: bool = option(
        True, "set up logging at all; without, Python's own rules decide (vLLM: VLLM_CONFIGURE_LOGGING)"
    )
    log_stats_interval: float = option(
        10.0, "seconds from one line with statistics to the next, while there is work", at_least=0.1
    )
    fail_on_environ_validation: bool = option(
        False, "refuse a variable VLLM_* or STAGES_* that nothing reads, instead of a warning"
    )
