"""Misconception: the last n tokens decide, because n tokens must not repeat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from judging import load

REJECTED = "A token is forbidden if the last n - 1 tokens"
reference = load(Path(__file__).parents[1] / "reference.py")
install, NoRepeatNgram, INDEX = reference.install, reference.NoRepeatNgram, reference.INDEX


def forbidden(token_ids: Sequence[int], n: int) -> set[int]:
    found: set[int] = reference.forbidden(token_ids, n + 1)
    return found
