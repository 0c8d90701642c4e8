"""`stats RUN`: where the time went, of the processes and of the requests."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from stagetrace.commands.common import add_run, open_recording
from stagetrace.event import Event
from stagetrace.ids import is_beam
from stagetrace.read.bounded import tell_bounded
from stagetrace.read.busy_time import STEP_PARTS, StartUp, StepTime
from stagetrace.read.lanes import WorkerTime, WorkerTimes
from stagetrace.read.latency import PARTS, Latency, Split, of_request, split_tpot, split_ttft
from stagetrace.read.story import RequestStory, StepStory
from stagetrace.read.terminal import milliseconds, short_id, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, and the form of the output."""
    add_run(parser)
    parser.add_argument("--requests", action="store_true", help="a line per request too")
    parser.add_argument("--json", action="store_true", help="all numbers as JSON, in nanoseconds, with every request")


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    latencies: list[Latency] = []
    steps: dict[int, StepTime] = {}  # by pid of the engine
    start_up, workers = StartUp(), WorkerTimes()

    def ended(request: RequestStory) -> None:
        if is_beam(request.request_id):  # a part of the request that searches
            return
        latency = of_request(request)
        if request.delivery.tokens or not request.delivery.children:  # the children of a request have its tokens
            latencies.append(latency)

    def of_step(step: StepStory) -> None:
        steps.setdefault(step.engine, StepTime()).feed(step)

    def of_event(event: Event) -> None:
        start_up.feed(event)
        workers.feed(event)

    story = tell_bounded(open_recording(args.run), ended, of_step, of_event)
    engines = sorted((story.processes[pid], pid) for pid in steps)
    latencies.sort(key=lambda latency: latency.arrival_ns)
    if args.json:
        print(
            json.dumps(
                _numbers(latencies, {pid: (name, steps[pid]) for name, pid in engines}, start_up, workers), indent=1
            )
        )
        return 0
    _print_start_up(start_up)
    for name, pid in engines:
        own = [(p, time) for p, time in workers.of_worker.items() if time.engine == pid]
        _print_steps(f"{name} ({pid})" if len(engines) > 1 else "engine", steps[pid])
        _print_workers(own, steps[pid].num_steps)
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


def _print_steps(name: str, steps: StepTime) -> None:
    if not steps.num_steps:
        return
    rows = [
        [part, milliseconds(time), f"{100 * time / (steps.total_ns or 1):.1f}%", milliseconds(time / steps.num_steps)]
        for part, time in steps.parts.items()
    ]
    rows = [[*row, meaning] for row, meaning in zip(rows, STEP_PARTS.values(), strict=True)]
    print(f"{name}: {steps.num_steps} steps, {steps.num_tokens} tokens computed (phase 8)")
    print(table(["part", "ms", "share", "ms per step", ""], rows, left=(0, 4)) + "\n")


def _print_workers(workers: list[tuple[int, WorkerTime]], num_steps: int) -> None:
    """Who waited for whom: the worker with the least time in collectives is the one that the others waited for."""
    rows = []
    for pid, worker in sorted(workers, key=lambda one: one[1].lane):
        rows.append([f"{worker.lane} ({pid})", "model.forward", "", milliseconds(worker.forward_ns), "", ""])
        for kind, one in sorted(worker.exchanges.items()):
            each = milliseconds(one.ns / one.count)
            rows.append(["", kind, str(one.count), milliseconds(one.ns), each, f"{one.bytes / max(1, num_steps):.0f}"])
    if rows:
        print(
            "its workers: the forward pass, and the collectives, most of which are part of it; a long one is waiting for the others"
        )
        print(table(["worker", "", "times", "ms", "ms each", "bytes per step"], rows, left=(0, 1)) + "\n")


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


def _numbers(
    latencies: list[Latency], engines: dict[int, tuple[str, StepTime]], start_up: StartUp, workers: WorkerTimes
) -> dict[str, Any]:
    splits = {"ttft_ns": split_ttft(latencies), "tpot_ns": split_tpot(latencies)}
    return {
        "start_up_ns": [
            {"process": proc, "phase": part.phase, "part": part.name, "ns": ns}
            for (proc, part), ns in start_up.parts.items()
        ],
        "engine": {  # all engines together
            "steps": sum(steps.num_steps for _, steps in engines.values()),
            "tokens": sum(steps.num_tokens for _, steps in engines.values()),
            "parts_ns": {part: sum(steps.parts[part] for _, steps in engines.values()) for part in STEP_PARTS},
        },
        "engines": [
            {"process": name, "pid": pid, "steps": steps.num_steps, "tokens": steps.num_tokens, "parts_ns": steps.parts}
            for pid, (name, steps) in engines.items()
        ],
        "workers": [{"pid": pid, **asdict(worker)} for pid, worker in workers.of_worker.items()],
        **{name: None if split is None else asdict(split) for name, split in splits.items()},
        "requests": [asdict(latency) for latency in latencies],
    }
