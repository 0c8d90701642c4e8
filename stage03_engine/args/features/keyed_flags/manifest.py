"""`--x.key 1` for `--x '{"key": 1}'`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="keyed_flags",
    help="a flag for a JSON object, key by key",
    room=__package__,
    parts=(Part("engine", ".keyed_flags:joined", key="keyed_flags"),),
)
