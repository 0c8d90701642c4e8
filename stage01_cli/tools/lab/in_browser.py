"""The laboratory in a browser: what the page's worker asks of Python. A scenario in, as JSON, and what `simulate` says of it out."""

from __future__ import annotations

import json

from stage01_cli.tools.lab.own_scheduler import OwnScheduler
from stage01_cli.tools.lab.simulate import simulate


def answer(question: str) -> str:
    """`{"scenario": ..., "own": the text of a class, or null}`."""
    asked = json.loads(question)
    own = None if asked["own"] is None else OwnScheduler(text=asked["own"])
    return json.dumps(simulate(asked["scenario"], own))
