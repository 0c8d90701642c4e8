"""Misconception: the end-of-text token is no text, so nobody needs it; but whoever waits for the end waits for ever."""

from __future__ import annotations

from pathlib import Path

from judging import load

REJECTED = "which is still returned"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def step(self) -> dict[str, list[int]]:
        ends = {each.request.request_id: each.request.eos_token_id for each in [*self.running, *self.waiting]}
        return {name: [each for each in tokens if each != ends[name]] for name, tokens in super().step().items()}
