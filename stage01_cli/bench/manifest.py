"""`stages bench`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="bench",
    help="measure a server, the engine, or its start",
    room=__package__,
    parts=(
        Part("command", ".command:BenchSubcommand", key="bench", help="measure a server, the engine, or its start"),
    ),
)
