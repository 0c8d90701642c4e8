"""The recorder: the one object through which every stage emits trace events.

Call sites read

    if trace.on:
        trace.emit("sched.admit", req=request.request_id, step=self.step, new_blocks=ids)

so that a switched-off trace costs one attribute read and one branch. A process starts in one of three states:

off      nothing is recorded (the default).
holding  events are kept in memory, because the command line that says whether and where to record is still being parsed.
open     events go to `DIR/<proc>-<pid>.jsonl`, to the console (stderr), or both.

An event is encoded at once, because its contents may change a moment later; the encoded line waits for the writer's thread.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from stagetrace.event import FORMAT_VERSION, Event, encode
from stagetrace.filters import EventFilter
from stagetrace.redact import redact_argv
from stagetrace.vocabulary import VOCABULARY
from stagetrace.writer import TraceFile, write_console_line

WRITE_EVERY = 4096  # events: an emitter that is faster than the writer's thread helps it, so memory stays bounded


class Recorder:
    """Collects the events of one process. Safe to call from several threads: giving a number and appending a line are each
    atomic, so no event is lost, and one that another thread overtakes between the two is only a few lines late."""

    def __init__(self) -> None:
        self.on = False
        self.prompts = False  # may events hold what clients wrote and received?
        self.run_id = ""
        self.proc = "main"
        self._pid = os.getpid()
        self._seq = itertools.count(1)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt an emit and emit
        self._held: list[Event] | None = None
        self._file: TraceFile | None = None
        self._add: Callable[[bytes], None] | None = (
            None  # the short way into the file, when there is nothing else to do
        )
        self._filter: EventFilter | None = None
        self._watcher: Callable[[Event], None] | None = None
        self._watched: Collection[str] = ()
        self._console = False
        self._wall_clock_ns = 0  # of this machine, when its monotonic clock was 0
        self._opened_at = ""  # file:line of the call of open
        self._run: dict[str, Any] = {}  # what every run.start of this process says
        self._places: dict[tuple[int, int], str] = {}  # (id of the code, place in it) -> file:line
        self._codes: list[CodeType] = []

    def hold(self, proc: str) -> None:
        """Start collecting in memory; `open` writes what was collected, `drop` forgets it."""
        self.close()
        self._pid, self.proc, self._held, self._filter, self.on = os.getpid(), proc, [], None, True

    def drop(self) -> None:
        """Forget what was held and switch off."""
        self._held, self.on = None, False

    def rename(self, proc: str) -> None:
        """Give the process another name, also in what it holds. Not once it is open: its file has the name."""
        self.proc = proc
        for event in self._held or []:
            event.proc = proc

    def open(
        self, directory: str | None, *, console: bool = False, run_id: str = "", prompts: bool = False,
        events: EventFilter | None = None, max_bytes: int | None = None, private: Collection[str] = (), **header: Any,
    ) -> None:  # fmt: skip
        """Write events to a file in `directory` (created if missing), and to stderr with `console`.

        `prompts`: events may hold what clients wrote and received. `events`: only those that it admits are kept.
        `max_bytes`: about how much disk the files of this process may use; the oldest events go first. `private`: words of
        the command line that are a prompt. The first record of a file is `run.start`, with number 0: run id, versions, one
        (monotonic, wall clock) pair, what was left out, and what the caller adds to `header` (config hash, seed). Raises
        OSError if the directory cannot be written.
        """
        held, self._held = self._held or [], None
        self._opened_at = self._new_place(sys._getframe(1))
        self._pid, self._console, self.prompts = os.getpid(), console, prompts
        self._wall_clock_ns = time.time_ns() - time.monotonic_ns()
        self._filter = events if events is not None and events.active else None
        self.run_id = run_id or uuid.uuid4().hex[:12]
        words = [os.path.basename(sys.argv[0]), *sys.argv[1:]] if sys.argv else []
        self._run = {
            "run_id": self.run_id,
            "python": sys.version.split()[0],
            "argv": redact_argv(words, () if prompts else private),
            "filter": {} if self._filter is None else self._filter.header,
            "prompts": prompts,
        } | header
        if directory is not None:
            name = f"{self.proc}-{self._pid}"
            self._file = TraceFile(Path(directory), name, lambda part: encode(self._start(part)) + b"\n", max_bytes)
            atexit.register(self.close)
        self.on = directory is not None or console
        if console:
            self._print(self._start(0))
        for event in held if self.on else []:
            for kept in [event] if self._filter is None else self._filter.admit(event):
                self._take(kept)
        self._choose_way()

    def watch(self, watcher: Callable[[Event], None] | None, names: Collection[str] = ()) -> None:
        """Show the events of these names to `watcher` as well, whether or not anything is recorded; None ends it.

        It is called at once, in the thread that emits, and must neither emit nor wait. It sees what a filter leaves out,
        and numbers (`seq`) are given later. There is one watcher at a time.
        """
        with self._lock:
            self._watcher, self._watched = watcher, names
            self._choose_way()
            self.on = self._records or watcher is not None

    @property
    def _records(self) -> bool:
        return self._file is not None or self._console or self._held is not None

    def _choose_way(self) -> None:
        short = self._file is not None and self._filter is None and not self._console and self._watcher is None
        self._add = self._file.add if short and self._file is not None else None

    def emit(
        self, name: str, *, ph: str = "i", req: str | None = None, step: int | None = None,
        cause: str | None = None, **args: Any,
    ) -> str | None:  # fmt: skip
        """Record one event and return its `ref`; None if the filter left it out.

        Raises KeyError for a name that is not in the vocabulary.
        """
        frame = sys._getframe(1)
        place = self._places.get((id(frame.f_code), frame.f_lasti)) or self._new_place(frame)
        phase, add = VOCABULARY[name].phase, self._add
        if add is None:
            return self._emit_slowly(name, phase, place, ph, req, step, cause, args)
        seq = next(self._seq)
        now, pid = time.monotonic_ns(), self._pid
        event = Event(FORMAT_VERSION, seq, now, pid, self.proc, ph, name, phase, place, req, step, cause, args)
        add(encode(event))
        if not seq % WRITE_EVERY:
            self.flush()
        return f"{pid}:{seq}"

    def _emit_slowly(
        self, name: str, phase: int, place: str, ph: str, req: str | None, step: int | None, cause: str | None,
        args: dict[str, Any],
    ) -> str | None:  # fmt: skip
        """While events are held, filtered, printed, or watched. The lock keeps the console in the order of the numbers."""
        if not self._records and name not in self._watched:
            return None
        with self._lock:
            now, pid = time.monotonic_ns(), self._pid
            event = Event(FORMAT_VERSION, 0, now, pid, self.proc, ph, name, phase, place, req, step, cause, args)
            if self._watcher is not None and name in self._watched:
                self._watcher(event)
            for each in (event,) if self._filter is None else self._filter.admit(event):
                each.seq = next(self._seq)
                self._take(each)
        return event.ref if event.seq else None

    def _new_place(self, frame: FrameType) -> str:
        """`file:line` of a call. Code is known by its id (its hash costs more than all the rest), so it must stay alive."""
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        self._codes.append(frame.f_code)
        self._places[id(frame.f_code), frame.f_lasti] = place
        return place

    def _take(self, event: Event) -> None:
        if self._held is not None:
            self._held.append(event)
            return
        if self._file is not None:
            self._file.add(encode(event))
        if self._console:
            self._print(event)

    def flush(self) -> None:
        """Hand buffered events to the operating system (called when a process goes idle)."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write out and stop recording; what was only held is forgotten. May be called twice."""
        self.on, self._add, self._held = False, None, None
        file, self._file = self._file, None
        if file is not None:
            atexit.unregister(self.close)
            file.close()

    def _start(self, part: int) -> Event:
        clocks = {"monotonic_ns": time.monotonic_ns(), "wall_clock_ns": time.time_ns()}
        row = VOCABULARY["run.start"]
        return Event(
            FORMAT_VERSION, 0, clocks["monotonic_ns"], self._pid, self.proc, "i", row.name, row.phase, self._opened_at,
            args=self._run | clocks | {"part": part},
        )  # fmt: skip

    def _clock(self, ts: int) -> str:
        """`11:02:03.123456`, the local time of an event: the same clock for all processes, and that of the log."""
        seconds, rest = divmod(ts + self._wall_clock_ns, 1_000_000_000)
        return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest // 1000:06d}"

    def _print(self, event: Event) -> None:
        try:
            write_console_line(f"{self.proc:<14} {self._clock(event.ts)} phase {event.phase} {event.console_line()}")
        except OSError:  # its reader is gone; that must not end the engine
            self._console = False


trace = Recorder()
"""The recorder of this process."""
