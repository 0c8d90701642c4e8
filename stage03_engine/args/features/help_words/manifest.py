"""`--help=WORD`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

EPILOG = (
    "--help=listgroup names the groups, --help=SchedulerConfig shows one, --help=cache all flags with that word in "
    "their names."
)
FEATURE = Feature(
    name="help_words",
    help="--help=WORD: the groups of flags, one group, or the flags with that word in their names",
    room=__package__,
    parts=(
        Part("engine", ".help_words:part_of_help", key="part_of_help"),
        Part("engine", ".manifest:EPILOG", key="epilog"),
    ),
)
