"""`stages course`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="course",
    help="exercises: rebuild a part, have it judged, let it serve",
    room=__package__,
    parts=(
        Part(
            "command",
            ".command:CourseSubcommand",
            key="course",
            help="exercises: rebuild a part, have it judged, let it serve",
        ),
    ),
    variables=("STAGES_PARTS",),
)
