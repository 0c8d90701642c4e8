"""Stat loggers of the user's own."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part, installed

GROUP = "vllm.stat_logger_plugins"

FEATURE = Feature(
    name="stat_loggers",
    help="stat loggers of your own: AsyncLLM(..., stat_loggers=[factory]), or from an installed package",
    room=__package__,
    parts=(
        Part("engine", ".stat_loggers:make_loggers", key="own_stat_loggers"),
        *([Part("stats", ".stat_loggers:PackageLoggers", key="package")] if installed(GROUP) else ()),
    ),
)
