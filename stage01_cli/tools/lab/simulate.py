"""`simulate(scenario)`: the real scheduler and block pool, step by step, without a model. JSON in, JSON out.

The page of `stages lab` asks it, in a process beside the server or in the browser itself. There is no clock and no randomness: a
scenario always gives the same answer. Every sampled token is made up, so a request ends after its `output` tokens and not before.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from typing import Any

from stage01_cli.tools.lab.bench import Bench, Problem
from stage01_cli.tools.lab.own_scheduler import OwnScheduler, TookTooLong
from stage01_cli.tools.lab.scenario import ScenarioError, read_scenario
from stage03_engine.core.scheduler import Scheduler
from stagetrace import Event
from stagetrace.check.reasons import explain_all

VERSION = 1
MAX_PRINTED = 10_000  # characters of what a scheduler prints


def simulate(scenario: Any, own: OwnScheduler | None = None) -> dict[str, Any]:
    """Run a scenario to its end, with the reference scheduler or with the learner's.

    Returns `problem` (a sentence, or None), and as far as it got: `requests`, `steps`, `cells` (see `Bench`), `why` (request -> step
    -> places in `texts`), `texts` ([rule, sentence]), `rules` (where each is in the code), `before` (the state when a step began, in
    words) and what the learner's scheduler `printed`. Never raises for what a scenario or the learner's class does.
    """
    answer: dict[str, Any] = {"version": VERSION, "problem": None, "printed": ""}
    try:
        checked = read_scenario(scenario)
    except ScenarioError as error:
        return answer | {"problem": f"The scenario cannot be read: {error}."}
    printed = _Printed()
    bench = Bench(checked)
    try:
        with redirect_stdout(printed):
            kind = Scheduler if own is None else own.load()
            bench.run(kind)
    except Problem as problem:
        answer["problem"] = str(problem)
    except BaseException as error:
        if own is None and not isinstance(error, TookTooLong):
            raise
        said = OwnScheduler().describe(error) if own is None else own.describe(error)
        answer["problem"] = f"Step {bench.step}: {said}" if bench.step else said
    answer["printed"] = printed.getvalue()
    answer |= {"settings": asdict(checked.settings), "requests": list(bench.facts.values())}
    return answer | {"steps": bench.steps, "cells": bench.cells} | _reasons(bench.events)


def _reasons(events: list[Event]) -> dict[str, Any]:
    """What `stages trace why` says about every request in every step. The learner's scheduler may emit nonsense."""
    try:
        explained = explain_all(events)
    except Exception:
        explained = {}
    texts: dict[tuple[str, str], int] = {}  # many steps have the same reason
    rules: dict[str, str] = {}
    before: dict[int, list[str]] = {}
    why: dict[str, dict[int, list[int]]] = {}
    for request_id, steps in explained.items():
        of_step = why.setdefault(request_id, {})
        for step in steps:
            before[step.step] = step.before
            rules |= {each.rule: each.places for each in step.reasons if each.rule not in rules}
            places = [texts.setdefault((each.rule, each.text), len(texts)) for each in step.reasons]
            of_step.setdefault(step.step, []).extend(places)
    return {"why": why, "texts": [list(text) for text in texts], "rules": rules, "before": before}


class _Printed(StringIO):
    """Keeps the beginning of what is printed."""

    def write(self, text: str) -> int:
        room = MAX_PRINTED - self.tell()
        if room > 0:
            super().write(text[:room])
        return len(text)
