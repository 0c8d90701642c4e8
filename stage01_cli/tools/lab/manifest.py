"""`stages lab`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="lab",
    help="drive the real scheduler from a page, without a model",
    room=__package__,
    parts=(
        Part(
            "command", ".command:LabSubcommand", key="lab", help="drive the real scheduler from a page, without a model"
        ),
    ),
)
