"""An engine in a process of its own: it loads the model, then runs a workload for each line on stdin. Standard library
only, as each engine's Python runs this."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from race.workloads import FULL, QUICK, Generate, Scale, measure


@dataclass(frozen=True)
class Settings:
    """What an engine is started with."""

    model: str  # folder, or GGUF file
    dtype: str  # in the engine's own words
    threads: int
    quick: bool

    @property
    def scale(self) -> Scale:
        """The sizes."""
        return QUICK if self.quick else FULL

    def argv(self) -> list[str]:
        """Behind the module's name."""
        return [self.model, self.dtype, str(self.threads), *(["--quick"] if self.quick else [])]


def serve(start: Callable[[Settings], Generate]) -> None:
    """Start the engine, say so, and answer `{"workload", "seed"}` with `{"measures"}` or `{"error"}` until stdin ends. What
    the engine itself prints goes to stderr."""
    settings = _settings()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = start(settings)
    scale = settings.scale
    sample = generate([list(range(100, 108))], 4, 0)  # what two engines with the same weights should agree on
    answers.write(json.dumps({"sample": sample[0]}) + "\n")
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            answer: dict[str, object] = {"measures": measure(ask["workload"], scale, generate, ask["seed"])}
        except Exception as error:  # whatever the engine raises is its answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _settings() -> Settings:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("threads", type=int)
    parser.add_argument("--quick", action="store_true")
    return Settings(**vars(parser.parse_args()))
