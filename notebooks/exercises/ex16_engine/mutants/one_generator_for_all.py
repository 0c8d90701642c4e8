"""Misconception: a seed seeds a generator, and one is enough; so whoever draws first changes what the others get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load

REJECTED = "does not depend on who is there beside it"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def add(self, request: Any) -> None:
        super().add(request)
        for each in [*self.running, *self.waiting]:
            each.generator = self.waiting[-1].generator
