"""Read a recording: merge the files of all processes into one causally ordered stream of events.

A recording of any size is read in bounded memory: of each file only a window of lines is held.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stagetrace.errors import TraceError
from stagetrace.event import Event, decode_line

REORDER_WINDOW = 256  # events by which the threads of a process may overtake each other on the way to the file
BATCH_BYTES = 1 << 16  # read at once, of each process
SAME_MACHINE_NS = (
    1_000_000_000  # a wall clock that was set during a run moves by less; two machines' monotonic clocks differ by more
)


class Recording:
    """A folder of trace files. Iterating reads it from the start, in causal order, as often as you like.

    After an iteration `torn` counts the files whose last line was unreadable: a crash tears at most that one.
    Raises FileNotFoundError if the folder holds no trace and, while iterating, TraceError for a foreign line.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.torn = 0
        self._zero: int | None = None  # the wall clock when the monotonic clock of the first process was 0
        files = sorted(self.directory.glob("*.jsonl"))
        if not files:
            raise FileNotFoundError(f"no trace in {directory}: expected files like APIServer-1234.jsonl")
        self._files: dict[str, list[Path]] = {}  # process -> its files, the oldest first
        for path in files:
            self._files.setdefault(path.name.partition(".")[0], []).append(path)
        for paths in self._files.values():  # a process that rotates: X.1.jsonl was written before X.jsonl
            paths.sort(key=lambda path: (path.name.count(".") == 1, path.name))

    def __iter__(self) -> Iterator[Event]:
        self.torn = 0
        return causal_order([self._process(paths) for paths in self._files.values()])

    def start_ns(self) -> int:
        """The earliest time near the beginning of any file; a file does not begin with its earliest event."""
        firsts = [itertools.islice(self._process(paths), REORDER_WINDOW) for paths in self._files.values()]
        return min((event.ts for events in firsts for event in events), default=0)

    def processes(self) -> dict[int, str]:
        """Process id -> name, in the order of their first records."""
        firsts = [event for paths in self._files.values() for event in itertools.islice(self._process(paths), 1)]
        return {event.pid: event.proc for event in sorted(firsts, key=lambda event: event.ts)}

    def _process(self, paths: list[Path]) -> Iterator[Event]:
        """The events of one process by sequence number, except the first records of its later files, which stay in place."""
        held: list[tuple[int, Event]] = []
        top, shift = 0, None
        for events in self._batches(paths):
            shift = self._shift(events) if shift is None else shift
            for event in events:
                event.ts += shift
                top = max(top, event.seq)
                held.append((event.seq or top, event))
            held.sort(key=_place)  # stable, and quick for what is nearly sorted
            ready = len(held) - REORDER_WINDOW
            if ready > 0:
                for _, event in held[:ready]:
                    yield event
                del held[:ready]
        for _, event in held:
            yield event

    def _shift(self, events: list[Event]) -> int:
        """What turns the times of a process into those of the first one's machine, in ns. 0 on the same machine, where the monotonic clock is
        the same; else what the wall clocks say, which is as exact as these were set."""
        start = next((event.args for event in events[:1] if event.name == "run.start"), {})
        if "wall_clock_ns" not in start:
            return 0
        zero = start["wall_clock_ns"] - start["monotonic_ns"]
        self._zero = zero if self._zero is None else self._zero
        return zero - self._zero if abs(zero - self._zero) > SAME_MACHINE_NS else 0

    def _batches(self, paths: list[Path]) -> Iterator[list[Event]]:
        for path in paths:
            with open(path, "rb") as file:
                number = 0
                while lines := file.readlines(BATCH_BYTES):
                    try:
                        yield [decode_line(line) for line in lines]
                    except msgspec.DecodeError:
                        yield list(self._doubtful(path, number, lines, last=not file.readline()))
                    number += len(lines)

    def _doubtful(self, path: Path, number: int, lines: list[bytes], last: bool) -> Iterator[Event]:
        """The events of a batch that holds a foreign line: the last one of a file may be torn."""
        for place, line in enumerate(lines, start=1):
            try:
                yield decode_line(line)
            except msgspec.DecodeError as error:
                if place < len(lines) or not last:
                    raise TraceError(f"{path}:{number + place}: not a trace event ({error})") from error
                self.torn += 1


def _place(held: tuple[int, Event]) -> int:
    return held[0]


def _parse_ref(ref: str) -> tuple[int, int] | None:
    pid, _, seq = ref.partition(":")
    return (int(pid), int(seq)) if pid.isdecimal() and seq.isdecimal() else None


class _Lane:
    """The events of one process; the next one can be looked at."""

    def __init__(self, number: int, events: Iterable[Event]) -> None:
        self.number = number
        self._events = iter(events)
        self.head: Event | None = next(self._events, None)
        self.pid = self.head.pid if self.head is not None else None
        self.blocked: list[tuple[int, _Lane]] = []  # (seq, lane): lanes that wait for an event of this process
        self._placed = -1  # the highest sequence number that was taken

    def pop(self) -> Event:
        """Take the next event."""
        event = self.head
        assert event is not None
        if event.seq > self._placed:
            self._placed = event.seq
        self.head = next(self._events, None)
        return event

    def will_bring(self, seq: int) -> bool:
        """May the event of this number still come?"""
        return self.head is not None and self._placed < seq and self.head.seq <= seq

    def freed(self) -> list[_Lane]:
        """The lanes that need not wait any longer: what they waited for is placed, or was never recorded."""
        free = [lane for seq, lane in self.blocked if not self.will_bring(seq)]
        self.blocked = [(seq, lane) for seq, lane in self.blocked if self.will_bring(seq)]
        return free


def causal_order(per_process: Iterable[Iterable[Event]]) -> Iterator[Event]:
    """Merge by time, but never place an event before its cause or before an earlier event of its own process.

    Each process's events come in the order of their sequence numbers. Kahn's algorithm with a heap on the time: among the
    events whose predecessors are all placed, the earliest is next. A cause that was not recorded (a crashed sender lost it, a
    filter left it out) does not hold anything back.
    """
    lanes = [lane for lane in itertools.starmap(_Lane, enumerate(per_process)) if lane.head is not None]
    of_pid = {lane.pid: lane for lane in lanes}
    ready: list[tuple[int, int, _Lane]] = []  # (time, tie-breaker, lane)

    def offer(lane: _Lane) -> None:
        if lane.head is None:
            return
        cause = _parse_ref(lane.head.cause) if lane.head.cause is not None else None
        sender = of_pid.get(cause[0]) if cause is not None else None
        if cause is not None and sender not in (None, lane) and sender.will_bring(cause[1]):
            sender.blocked.append((cause[1], lane))
        else:
            heapq.heappush(ready, (lane.head.ts, lane.number, lane))

    for lane in lanes:
        offer(lane)
    while ready or any(lane.blocked for lane in lanes):
        if not ready:  # contradictory causes, which no run writes: show the events all the same
            broken = next(lane for lane in lanes if lane.blocked)
            lane = broken.blocked.pop()[1]
            heapq.heappush(ready, (0, lane.number, lane))
        lane = heapq.heappop(ready)[2]
        yield lane.pop()
        while lane.head is not None and lane.head.cause is None and not lane.blocked:
            if ready and (lane.head.ts, lane.number) > ready[0][:2]:
                break
            yield lane.pop()  # the heap would give this lane again
        for other in lane.freed() if lane.blocked else ():
            offer(other)
        offer(lane)


@dataclass
class Run:
    """A recording in memory. `events` are in causal order; `torn` counts unreadable last lines (one per crashed process)."""

    events: list[Event]
    torn: int = 0
    run_ids: set[str] = field(default_factory=set)

    def of_request(self, request_id: str) -> list[Event]:
        """All events of one request, in causal order."""
        return [e for e in self.events if e.req == request_id]

    def named(self, name: str) -> list[Event]:
        """All events of one name, in causal order."""
        return [e for e in self.events if e.name == name]


def read_run(directory: str | Path) -> Run:
    """Read a whole recording. Raises FileNotFoundError if there is none, TraceError for a foreign line."""
    recording = Recording(directory)
    events = list(recording)
    return Run(events, recording.torn, {e.args["run_id"] for e in events if e.name == "run.start"})
