"""Misconception: all models have as many heads as the one at hand."""

from __future__ import annotations

from pathlib import Path

from judging import load

REJECTED = "those of its config.json"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.heads = 2
