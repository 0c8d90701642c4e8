"""`stats RUN`: where the time went, of the processes and of the requests."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from stagetrace.commands.common import add_run, open_recording
from stagetrace.ids import is_beam
from stagetrace.read.bounded import tell_bounded
from stagetrace.read.busy_time import STEP_PARTS, StartUp, StepTime
from stagetrace.read.latency import PARTS, Latency, Split, of_request, split_tpot, split_ttft
from stagetrace.read.story import RequestStory
from stagetrace.read.terminal import milliseconds, short_id, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, and the form of the output."""
    add_run(parser)
    parser.add_argument("--requests", action="store_true", help="a line per request too")
    parser.add_argument("--json", action="store_true", help="all numbers as JSON, in nanoseconds, with every request")


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    latencies: list[Latency] = []
    steps, start_up = StepTime(), StartUp()

    def ended(request: RequestStory) -> None:
        if is_beam(request.request_id):  # a part of the request that searches
            return
        latency = of_request(request)
        if request.delivery.tokens or not request.delivery.children:  # the children of a request have its tokens
            latencies.append(latency)

    tell_bounded(open_recording(args.run), ended, steps.feed, start_up.feed)
    latencies.sort(key=lambda latency: latency.arrival_ns)
    if args.json:
        print(json.dumps(_numbers(latencies, steps, start_up), indent=1))
        return 0
    _print_start_up(start_up)
    _print_steps(steps)
    reached = sum(1 for latency in latencies if latency.num_tokens)
    print(f"requests: {len(latencies)}, {reached} of them with tokens ({sum(one.num_tokens for one in latencies)})")
    ttft, tpot = split_ttft(latencies), split_tpot(latencies)
    _print_split("TTFT: from the HTTP request until the first token left for the client", ttft)
    _print_split("TPOT: from one token to the next at the client, streamed answers", tpot)
    if ttft is not None:
        print("The parts say where the awaited token was. Their means add up; percentiles do not. Times in ms.")
        for part in PARTS:
            if part.name in ttft.parts or (tpot is not None and part.name in tpot.parts):
                print(f"  {part.name:<11} {part.meaning}")
    if args.requests:
        _print_requests(latencies)
    return 0


def _print_start_up(start_up: StartUp) -> None:
    if start_up.parts:
        rows = [
            [str(part.phase or "-"), part.name, proc, milliseconds(time)]
            for (proc, part), time in sorted(start_up.parts.items(), key=lambda item: (item[0][1].rank, item[0][0]))
        ]
        print("start-up: the time before each event counts towards its phase; processes run in parallel")
        print(table(["phase", "", "process", "ms"], rows, left=(1, 2)) + "\n")


def _print_steps(steps: StepTime) -> None:
    if not steps.num_steps:
        return
    rows = [
        [part, milliseconds(time), f"{100 * time / (steps.total_ns or 1):.1f}%", milliseconds(time / steps.num_steps)]
        for part, time in steps.parts.items()
    ]
    rows = [[*row, meaning] for row, meaning in zip(rows, STEP_PARTS.values(), strict=True)]
    print(f"engine: {steps.num_steps} steps, {steps.num_tokens} tokens computed (phase 8)")
    print(table(["part", "ms", "share", "ms per step", ""], rows, left=(0, 4)) + "\n")


def _print_split(title: str, split: Split | None) -> None:
    if split is None:
        return
    phases = {part.name: str(part.phase or "-") for part in PARTS}
    rows = []
    for name, one in [*split.parts.items(), ("together", split.whole)]:
        share = f"{100 * one.mean / (split.whole.mean or 1):.1f}%"
        rows.append([phases.get(name, ""), name, share, *map(milliseconds, (one.mean, one.p50, one.p90, one.p99))])
    print(f"\n{title} ({split.num_requests} requests)")
    print(table(["phase", "part", "share", "mean", "p50", "p90", "p99"], rows, left=(1,)))


def _print_requests(latencies: list[Latency]) -> None:
    for title in ("TTFT", "TPOT"):
        pairs = [(one, one.ttft_ns, one.ttft) if title == "TTFT" else (one, one.tpot_ns, one.tpot) for one in latencies]
        shown = [part.name for part in PARTS if any(part.name in parts for _, _, parts in pairs)]
        rows = [
            [short_id(one.request_id), str(one.num_tokens), one.reason or "-", milliseconds(whole)]
            + [milliseconds(parts.get(part)) for part in shown]
            for one, whole, parts in pairs
        ]
        print(f"\n{title} of each request, ms")
        print(table(["request", "tokens", "end", title, *shown], rows, left=(0, 2)))


def _numbers(latencies: list[Latency], steps: StepTime, start_up: StartUp) -> dict[str, Any]:
    splits = {"ttft_ns": split_ttft(latencies), "tpot_ns": split_tpot(latencies)}
    return {
        "start_up_ns": [
            {"process": proc, "phase": part.phase, "part": part.name, "ns": ns}
            for (proc, part), ns in start_up.parts.items()
        ],
        "engine": {"steps": steps.num_steps, "tokens": steps.num_tokens, "parts_ns": steps.parts},
        **{name: None if split is None else asdict(split) for name, split in splits.items()},
        "requests": [asdict(latency) for latency in latencies],
    }
