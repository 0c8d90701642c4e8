"""Misconception: what the client wrote is no repetition of the model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from judging import load

REJECTED = "Prompt and answer count as one text."
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, install, INDEX = reference.forbidden, reference.install, reference.INDEX


class NoRepeatNgram(reference.NoRepeatNgram):
    def apply(self, logits: Any, rows: list[Any]) -> Any:
        return super().apply(logits, [replace(row, prompt_token_ids=row.prompt_token_ids[:0]) for row in rows])
