"""`stages napkin`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="napkin",
    help="how many users a chip serves, and what a token costs, from bytes and operations alone",
    room=__package__,
    parts=(
        Part(
            "command", ".command:NapkinSubcommand", key="napkin", help="how many users a chip serves, and at what cost"
        ),
    ),
)
