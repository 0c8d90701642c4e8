"""Misconception: what runs cannot be stopped in the middle, so only those who wait are looked through."""

from __future__ import annotations

from pathlib import Path

from judging import load

REJECTED = "After abort() nothing more comes"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def abort(self, request_id: str) -> None:
        running = self.running
        super().abort(request_id)
        self.running = running
