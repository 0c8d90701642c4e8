"""Misconception: what is forbidden is forbidden, even if nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

REJECTED = "If all tokens would be forbidden, none is."
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, install, INDEX = reference.forbidden, reference.install, reference.INDEX


class NoRepeatNgram(reference.NoRepeatNgram):
    def apply(self, logits: Any, rows: list[Any]) -> Any:
        got = super().apply(logits, rows)
        for number, row in enumerate(rows):
            seen = {*row.prompt_token_ids.tolist(), *row.output_token_ids.tolist()}
            if row.sampling_params.extra_args.get("no_repeat_ngram") == 1 and len(seen) == got.shape[1]:
                got[number] = float("-inf")
        return got
