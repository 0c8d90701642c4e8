"""`--log-config-file` and `--configure-logging`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class LogConfigFlags:
    """Part of ObservabilityConfig."""

    log_config_file: str | None = option(
        None, "JSON file that sets up logging, in the form of Python's logging.config.dictConfig"
    )
    configure_logging: bool = option(
        True, "set up logging at all; without, Python's own rules decide (vLLM: VLLM_CONFIGURE_LOGGING)"
    )


class LogConfigCheck:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a file that cannot be read."""
        if (path := config.observability_config.log_config_file) is not None:
            from stage03_engine.args.features.log_config.log_config import read_log_config

            read_log_config(path)


FEATURE = Feature(
    name="log_config",
    help="a log of your own",
    room=__package__,
    settings={"ObservabilityConfig": LogConfigFlags, "VllmConfig": LogConfigCheck},
    parts=(Part("engine", ".log_config:set_up", key="log_config"),),
)
