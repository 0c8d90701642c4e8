"""Misconception: the client sends a number, because the documentation says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

REJECTED = "A value that is not an int of at least 1"
reference = load(Path(__file__).parents[1] / "reference.py")
forbidden, install, INDEX = reference.forbidden, reference.install, reference.INDEX


class NoRepeatNgram(reference.NoRepeatNgram):
    def apply(self, logits: Any, rows: list[Any]) -> Any:
        logits = logits.clone()
        for number, row in enumerate(rows):
            n = row.sampling_params.extra_args.get("no_repeat_ngram")
            if n:
                tokens = [*row.prompt_token_ids.tolist(), *row.output_token_ids.tolist()]
                banned = reference.forbidden(tokens, n)
                if len(banned) < logits.shape[1]:
                    logits[number, list(banned)] = float("-inf")
        return logits
