"""Misconception: there are so many seats, and whoever finds none can come again; but nobody is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

REJECTED = "However many requests are added at once"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def add(self, request: Any) -> None:
        if len(self.running) + len(self.waiting) < reference.SEATS:
            super().add(request)
