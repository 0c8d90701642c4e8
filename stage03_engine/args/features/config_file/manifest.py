"""`--config`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="config_file",
    help="settings in a YAML file",
    room=__package__,
    parts=(Part("engine", ".config_file:read_config_file", key="config_file"),),
)
