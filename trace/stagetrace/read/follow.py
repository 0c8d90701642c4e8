"""Read a recording while it is being written: events as they come, processes as they appear."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stagetrace.errors import TraceError
from stagetrace.event import Event, decode_line
from stagetrace.read.reader import BATCH_BYTES, causal_order

POLL_SECONDS = 0.1
SETTLE_SECONDS = (
    0.7  # a process writes its events at most half a second late: until then the others' are held for their order
)
MAX_HELD = 20_000  # events


class _Tail:
    """One file that may still grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open(path, "rb")  # stays open as long as the run, also when it is renamed
        self.last_ts = 0
        self._rest = b""  # a line whose end is not written yet

    def read(self) -> list[Event]:
        """The next complete lines, [] if there are none now. Raises TraceError for a foreign line."""
        data = self._rest + self.file.read(BATCH_BYTES)
        lines = data.split(b"\n")
        self._rest = lines.pop()
        try:
            events = [decode_line(line) for line in lines]
        except msgspec.DecodeError as error:
            raise TraceError(f"{self.path}: not a trace event ({error})") from error
        if events:
            self.last_ts = events[-1].ts
        return events


class Follower:
    """Iterating gives the events in causal order and waits for more. It ends when all processes of the run have ended."""

    def __init__(self, directory: str | Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self.directory = Path(directory)
        self._sleep = sleep
        self._tails: dict[tuple[int, int], _Tail] = {}  # (device, inode) -> file: rotation changes names
        self._held: list[tuple[float, Event]] = []  # when it was read
        self._pids: set[int] = set()
        self.start_ns = 0  # the earliest time, known with the first event

    def __iter__(self) -> Iterator[Event]:
        while True:
            ended = bool(self._pids) and not any(map(_is_alive, self._pids))
            if self._read():
                if len(self._held) > MAX_HELD:  # much was written before: no need to wait for its order
                    yield from self._release(self._held[MAX_HELD // 2][0])
            elif ended:  # and nothing was written since
                yield from self._release(float("inf"))
                return
            else:
                yield from self._release(time.monotonic() - SETTLE_SECONDS)
                self._sleep(POLL_SECONDS)

    def _read(self) -> bool:
        """Read a little of the file that is behind the others; False if there is nothing new."""
        for path in self.directory.glob("*.jsonl"):
            status = path.stat()
            if (status.st_dev, status.st_ino) not in self._tails:
                self._tails[status.st_dev, status.st_ino] = _Tail(path)
        for tail in sorted(self._tails.values(), key=lambda tail: tail.last_ts):
            events = tail.read()
            if events:
                now = time.monotonic()
                self._held += [(now, event) for event in events]
                self._pids.update(event.pid for event in events)
                return True
        return False

    def _release(self, until: float) -> Iterator[Event]:
        """What was read until then, and what comes before it in causal order."""
        due = {id(event) for read, event in self._held if read <= until}
        if not due:
            return
        self.start_ns = self.start_ns or min(event.ts for _, event in self._held)
        lanes: dict[int, list[tuple[float, Event]]] = {}
        for item in sorted(self._held, key=lambda item: item[1].seq):
            lanes.setdefault(item[1].pid, []).append(item)
        ordered = list(causal_order([[event for _, event in lane] for lane in lanes.values()]))
        count = 1 + max(place for place, event in enumerate(ordered) if id(event) in due)
        out = {id(event) for event in ordered[:count]}
        self._held = [item for item in self._held if id(item[1]) not in out]
        yield from ordered[:count]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True
