"""Misconception: the index is the list of what I add to the server."""

from __future__ import annotations

from pathlib import Path

from judging import load

REJECTED = "All routes that the server had are still there."
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, install, NoRepeatNgram, INDEX = (
    reference.forbidden,
    reference.install,
    reference.NoRepeatNgram,
    reference.INDEX,
)


INDEX = (*(room for room in INDEX if str(room).startswith("stage03")), INDEX[-1])
