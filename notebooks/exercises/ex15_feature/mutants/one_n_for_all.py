"""Misconception: a batch has one setting: that of its first request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from judging import load

REJECTED = "Each row follows its own request"
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, install, INDEX = reference.forbidden, reference.install, reference.INDEX


class NoRepeatNgram(reference.NoRepeatNgram):
    def apply(self, logits: Any, rows: list[Any]) -> Any:
        params = rows[0].sampling_params if rows else None
        return super().apply(logits, [replace(row, sampling_params=params) for row in rows])
