"""`--show-hidden-metrics-for-version` (vllm/config/observability.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(\.\d{1,4})?")


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number. Raises ConfigError."""
    if (match := _VERSION.fullmatch(text)) is None:
        raise ConfigError(f"show_hidden_metrics_for_version must be a version of vLLM such as 0.11, not {text!r}")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class HiddenMetrics:
    """Part of ObservabilityConfig."""

    show_hidden_metrics_for_version: str | None = option(
        None,
        "show in /metrics also the older names that this version of vLLM still had, such as 0.11, for older dashboards",
    )


class HiddenMetricsFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for what is no version."""
        if (version := config.observability_config.show_hidden_metrics_for_version) is not None:
            parse_version(version)


FEATURE = Feature(
    name="hidden_metrics",
    help="metrics under names that vLLM has given up",
    room=__package__,
    settings={"ObservabilityConfig": HiddenMetrics, "VllmConfig": HiddenMetricsFlags},
    parts=(
        Part(
            "engine",
            ".logger:HiddenMetricsLogger",
            key="hidden_metrics",
            flags=("show_hidden_metrics_for_version",),
        ),
    ),
    needs=("prometheus",),
)
