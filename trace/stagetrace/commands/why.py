"""`why RUN --req ID --step N`: why a request waited, was preempted, or got what it got."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from stagetrace.check.reasons import StepReasons, explain, find_request
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
    first, last, found = None, None, False
    for step in steps:
        first, last = first or step.step, step.step
        if step.step == args.step:  # twice, if it was aborted after its step
            _print_step(request_id, step)
            found = True
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


def _print_step(request_id: str, step: StepReasons) -> None:
    say(f"{request_id} in step {step.step}")
    for line in step.before:
        say(f"  before: {line}")
    for reason in step.reasons:
        say(f"- {reason.text}")
        say(f"    rule: {reason.places}")


def _ranges(steps: Iterable[StepReasons]) -> Iterator[str]:
    """Steps with the same reasons as one line."""
    first, last, words = 0, 0, ""
    for step in steps:
        own = ", ".join(reason.short for reason in step.reasons)
        if own != words:
            if words:
                yield _range(first, last, words)
            first, words = step.step, own
        last = step.step
    if words:
        yield _range(first, last, words)


def _range(first: int, last: int, words: str) -> str:
    return f"step {first}: {words}" if first == last else f"steps {first} to {last}: {words}"
