"""Misconception: the table of features is the list of what I add."""

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


INDEX = INDEX[-1:]
