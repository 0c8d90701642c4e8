"""`why RUN --req ID --step N`: why a request waited, was preempted, or got what it got."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from stagetrace.check.reasons import StepReasons, chances_of_step, explain, find_request, time_of_step
from stagetrace.commands.common import add_run
from stagetrace.errors import TraceError
from stagetrace.read.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, the request, the step."""
    add_run(parser)
    parser.add_argument("--req", required=True, metavar="ID", help="the request: its id, or a part that no other has")
    parser.add_argument(
        "--step", type=int, metavar="N", help="one engine step, in full; a summary of all steps if not given"
    )


def run(args: argparse.Namespace) -> int:
    """Print the reasons."""
    request_id = find_request(args.run, args.req)
    steps = explain(args.run, request_id)
    if args.step is None:
        say(f"{request_id}:")
        for line in _ranges(steps):
            say(f"  {line}")
        return 0
    first, last = None, None
    several = False  # engines
    found: dict[int, str] = {}  # pid of an engine that had it in such a step -> its name
    for step in steps:
        several |= not step.step
        if step.step:
            first, last = min(first or step.step, step.step), max(last or 0, step.step)
        if step.step and step.step == args.step:  # twice, if it was aborted after its step, or ran on two engines
            _print_step(request_id, step, f" of {step.process}" if several else "")
            found[step.engine] = step.process
    for engine, name in found.items():
        for line in chances_of_step(args.run, request_id, engine, args.step):
            say(f"- {line}")
        times = time_of_step(args.run, engine, args.step)
        if times:
            say(f"the workers of {name} in step {args.step}")
        for line in times:
            say(f"- {line}")
    if found:
        return 0
    if first is None or last is None or args.step < 1:
        raise TraceError(
            f"no step {args.step}: the recording ends before {request_id} could be part of one, or it counts from 1"
        )
    there = f"it was there from step {first} to step {last}"
    when = (
        "had not arrived yet" if args.step < first else "had ended already" if args.step > last else "was passed over"
    )
    say(f"{request_id} in step {args.step}")
    say(f"- It {when}: {there}.")
    return 0


def _print_step(request_id: str, step: StepReasons, engine: str) -> None:
    say(f"{request_id} in step {step.step}{engine}")
    for line in step.before:
        say(f"  before: {line}")
    for reason in step.reasons:
        say(f"- {reason.text}")
        say(f"    rule: {reason.places}")


def _ranges(steps: Iterable[StepReasons]) -> Iterator[str]:
    """Steps with the same reasons as one line."""
    first, last, words = 0, 0, ""
    engine = 0
    for step in steps:
        own = ", ".join(reason.short for reason in step.reasons)
        if (own, step.engine) != (words, engine):
            if words:
                yield _range(first, last, words)
            first, words, engine = step.step, own, step.engine
        last = step.step
    if words:
        yield _range(first, last, words)


def _range(first: int, last: int, words: str) -> str:
    if not first:  # between the engines
        return words
    return f"step {first}: {words}" if first == last else f"steps {first} to {last}: {words}"
