"""`stages walk`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="walk",
    help="run one request, and tell its path through this code",
    room=__package__,
    parts=(
        Part(
            "command",
            ".command:WalkSubcommand",
            key="walk",
            help="run one request, and tell its path through this code",
        ),
    ),
)
