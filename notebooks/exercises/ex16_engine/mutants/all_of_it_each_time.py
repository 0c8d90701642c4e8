"""Misconception: a client wants the answer, so each step returns all of it."""

from __future__ import annotations

from pathlib import Path

from judging import load

REJECTED = "step() returns the tokens that are new"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def step(self) -> dict[str, list[int]]:
        there = {each.request.request_id: each for each in [*self.running, *self.waiting]}
        return {name: there[name].tokens[len(there[name].request.prompt_token_ids) :] for name in super().step()}
