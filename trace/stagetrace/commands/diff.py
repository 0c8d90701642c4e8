"""`diff A B`: the first difference between two recordings, and the state of both."""

from __future__ import annotations

import argparse
from itertools import zip_longest
from pathlib import Path

from stagetrace.check.difference import Fact, Lane, StepFacts, compare
from stagetrace.commands.common import add_run
from stagetrace.read.engine_state import MANY
from stagetrace.read.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two recordings."""
    add_run(parser, "a")
    add_run(parser, "b")
    parser.add_argument(
        "--only", choices=["engine"], help="engine: compare what the engine decided, not what the front end said of it"
    )


def run(args: argparse.Namespace) -> int:
    """0 if they are the same, 1 if they differ."""
    result = compare(args.a, args.b, args.only == "engine")
    for label, path, steps, requests in zip("AB", (args.a, args.b), result.num_steps, result.num_requests):
        say(f"{label} = {Path(path).name}: {steps} steps, {requests} requests")
    if len(result.engines[0]) != len(result.engines[1]):
        for label, engines in zip("AB", result.engines):
            say(f"engines of {label}: {', '.join(engines) or 'none'}")
        print(
            "they differ in the number of engines: engines with the same number are compared, the others have no counterpart"
        )
    for line in result.settings:
        say(f"settings differ: {line}")
    for number, lane in result.steps.items():
        _print_step(lane, f" of engine {number}" if max(map(len, result.engines)) > 1 else "")
    if result.requests:
        print(f"{len(result.requests)} requests differ:")
    for name, lane in list(result.requests.items())[:MANY]:
        say(f"  {name}, its event {lane.place + 1}:")
        say(f"    A: {lane.a or 'has ended'}")
        say(f"    B: {lane.b or 'has ended'}")
    if len(result.requests) > MANY:
        print(f"  and {len(result.requests) - MANY} more")
    if result.same:
        print("no difference: the same decisions, the same requests")
    return 0 if result.same else 1


def _print_step(lane: Lane, engine: str) -> None:
    step = next(item.step for item in (lane.a, lane.b) if isinstance(item, StepFacts))
    print(f"step {step}{engine} is the first that differs ({lane.place} steps before it are the same)")
    sides = [item if isinstance(item, StepFacts) else None for item in (lane.a, lane.b)]
    for label, side in zip("AB", sides):
        words = side.before.in_words() if side is not None else ["the recording ends before this step"]
        for line in words:
            say(f"  {label} before: {line}")
    facts: list[list[Fact]] = [side.facts if side is not None else [] for side in sides]
    same = 0
    for pair in zip_longest(*facts):
        if pair[0] != pair[1]:
            break
        same += 1
    for label, mine, other in zip("AB", facts, reversed(facts)):
        rest = mine[same:]
        own = [fact for fact in rest if fact not in other] or rest
        for fact in own[:MANY]:
            say(f"  {label} does:   {fact}")
        if len(own) > MANY:
            print(f"  {label} and {len(own) - MANY} events more")
