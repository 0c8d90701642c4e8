"""Misconception: a large penalty is as good as -inf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

REJECTED = "The logit of a forbidden token becomes -inf"
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, install, INDEX = reference.forbidden, reference.install, reference.INDEX


class NoRepeatNgram(reference.NoRepeatNgram):
    def apply(self, logits: Any, rows: list[Any]) -> Any:
        got = super().apply(logits, rows)
        return got.where(got == logits, logits - 100.0)
