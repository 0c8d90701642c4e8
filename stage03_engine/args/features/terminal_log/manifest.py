"""The log in a terminal."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="terminal_log",
    help="in a terminal the log's lines begin briefly, break between words, and have colours; in files and pipes they are whole",
    room=__package__,
    parts=(Part("engine", ".terminal_log:formatter_for", key="terminal_log"),),
)
