"""`stages book`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="book",
    help="the READMEs, the notebooks, the players and the code as one static site",
    room=__package__,
    parts=(
        Part(
            "command",
            ".command:BookSubcommand",
            key="book",
            help="write the book: one folder that any web server can serve",
        ),
    ),
)
