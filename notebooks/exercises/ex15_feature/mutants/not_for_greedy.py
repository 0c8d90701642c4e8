"""Misconception: greedy takes the best token anyway, so a processor need not run."""

from __future__ import annotations

from pathlib import Path

from judging import load

REJECTED = "The processor also runs for greedy requests"
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, install, INDEX = reference.forbidden, reference.install, reference.INDEX


class NoRepeatNgram(reference.NoRepeatNgram):
    def is_argmax_invariant(self) -> bool:
        return True
