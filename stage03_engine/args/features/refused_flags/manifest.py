"""vLLM's flags and request fields that are not built."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="refused_flags",
    help="vLLM's flags and request fields that are not built, each with its reason; accepted where they ask for nothing",
    room=__package__,
    parts=(
        Part("engine", ".refused:add_tables", key="refused_flags"),
        Part("engine", ".refused:accepts_key", key="refused_keys"),
        Part("engine", ".refused:check_fields", key="refused_fields"),
    ),
)
