"""Read a recording: merge the files of all processes into one causally ordered list of events."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stagetrace.event import Event, decode_line


@dataclass
class Run:
    """A recording. `events` are in causal order; `torn` counts unreadable last lines (one per process that crashed)."""

    events: list[Event]
    torn: int = 0
    run_ids: set[str] = field(default_factory=set)

    def of_request(self, request_id: str) -> list[Event]:
        """All events of one request, in causal order."""
        return [e for e in self.events if e.req == request_id]

    def named(self, name: str) -> list[Event]:
        """All events of one name, in causal order."""
        return [e for e in self.events if e.name == name]


def _read_file(path: Path) -> tuple[list[Event], int]:
    """Events of one process by sequence number. Only the last line may be unreadable: a crash tears it."""
    lines = path.read_bytes().splitlines()
    events: list[Event] = []
    torn = 0
    for number, line in enumerate(lines, start=1):
        try:
            events.append(decode_line(line))
        except msgspec.DecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: not a trace event ({error})") from error
            torn = 1
    events.sort(key=lambda e: e.seq)
    return events, torn


def causal_order(per_process: list[list[Event]]) -> list[Event]:
    """Merge by time, but never place an event before its cause or before an earlier event of its own process.

    Kahn's algorithm with a heap on the time: among the events whose predecessors are all placed, the earliest is next.
    A cause that was not recorded (a crashed sender lost it) does not hold anything back.
    """
    known = {e.ref for events in per_process for e in events}
    waiting_for: dict[str, list[int]] = {}  # cause -> processes that stand still until it is placed
    heads = [0] * len(per_process)
    ready: list[tuple[int, int]] = []  # (time, process)
    placed: set[str] = set()
    ordered: list[Event] = []

    def offer(process: int) -> None:
        if heads[process] == len(per_process[process]):
            return
        event = per_process[process][heads[process]]
        if event.cause is not None and event.cause in known and event.cause not in placed:
            waiting_for.setdefault(event.cause, []).append(process)
        else:
            heapq.heappush(ready, (event.ts, process))

    for process in range(len(per_process)):
        offer(process)
    while ready:
        _, process = heapq.heappop(ready)
        event = per_process[process][heads[process]]
        heads[process] += 1
        placed.add(event.ref)
        ordered.append(event)
        for blocked in waiting_for.pop(event.ref, []):
            offer(blocked)
        offer(process)
    return ordered


def read_run(directory: str | Path) -> Run:
    """Read every `*.jsonl` in a folder. Raises FileNotFoundError when there is none, ValueError for a foreign line."""
    paths = sorted(Path(directory).glob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"no trace in {directory}: expected files like APIServer-1234.jsonl")
    per_process, torn = [], 0
    for path in paths:
        events, torn_here = _read_file(path)
        per_process.append(events)
        torn += torn_here
    run = Run(causal_order(per_process), torn)
    run.run_ids = {e.args["run_id"] for e in run.events if e.name == "run.start"}
    return run
