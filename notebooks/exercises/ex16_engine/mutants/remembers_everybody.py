"""Misconception: a table of all requests is handy; it grows with each, and with the cache of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

REJECTED = "leaves nothing behind"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def begin(self, sequence: Any) -> Any:
        self.__dict__.setdefault("all", {})[sequence.request.request_id] = sequence
        return super().begin(sequence)
