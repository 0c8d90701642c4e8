"""`--config`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

EPILOG = "The file of --config holds the same settings, one `max-num-seqs: 8` per line."
FEATURE = Feature(
    name="config_file",
    help="settings in a YAML file",
    room=__package__,
    parts=(
        Part("engine", ".config_file:read_config_file", key="config_file"),
        Part("engine", ".manifest:EPILOG", key="epilog"),
    ),
)
