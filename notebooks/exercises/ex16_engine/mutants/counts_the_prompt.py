"""Misconception: max_tokens is how long the text may become; but the prompt is not part of the answer."""

from __future__ import annotations

from pathlib import Path

from judging import load

REJECTED = "An answer ends with its token number max_tokens"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def step(self) -> dict[str, list[int]]:
        new = super().step()
        self.running = [each for each in self.running if len(each.tokens) < each.request.max_tokens]
        return new
