"""The recorder: the one object through which every stage emits trace events.

Call sites read

    if trace.on:
        trace.emit("sched.admit", req=request.request_id, step=self.step, new_blocks=ids)

so that a switched-off trace costs one attribute read and one branch. A process starts in one of three states:

off      nothing is recorded (the default).
holding  events are kept in memory, because the command line that says whether and where to record is still being parsed.
open     events go to `DIR/<proc>-<pid>.jsonl`, to the console (stderr), or both.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO

from stagetrace.event import FORMAT_VERSION, Event, encode_line
from stagetrace.vocabulary import VOCABULARY

FLUSH_INTERVAL_NS = 500_000_000  # a crash loses at most the events of this last half second


class Recorder:
    """Collects the events of one process. Safe to call from several threads: the sequence number and the buffered
    write are each atomic under the interpreter's lock, and a reader sorts by sequence number."""

    def __init__(self) -> None:
        self.on = False
        self.prompts = False  # may events hold what clients wrote and what they were answered?
        self.run_id = ""
        self.proc = "main"
        self._pid = os.getpid()
        self._seq = itertools.count(1)
        self._held: list[Event] | None = None
        self._file: BinaryIO | None = None
        self._console = False
        self._last_flush = 0

    def hold(self, proc: str) -> None:
        """Start to collect in memory; `open` writes what was collected, `drop` forgets it."""
        self.close()
        self._pid, self.proc, self._held, self.on = os.getpid(), proc, [], True

    def drop(self) -> None:
        """Forget what was held and switch off."""
        self._held, self.on = None, False

    def open(self, directory: str | None, *, console: bool = False, run_id: str = "", **header: Any) -> None:
        """Write events to a file in `directory` (made if missing), and to stderr with `console`.

        The first record is `run.start` with the run id, versions, one (monotonic, wall clock) pair and what the caller
        adds to `header` (config hash, seed). Raises OSError when the directory cannot be written.
        """
        held, self._held = self._held or [], None
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self._pid, self._console = os.getpid(), console
        if directory is not None:
            folder = Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / f"{self.proc}-{self._pid}.jsonl", "ab", buffering=1 << 16)
            atexit.register(self.close)
        self.on = directory is not None or console
        if self.on:
            start = self._make("run.start", "i", None, None, None, self._header() | header, depth=2)
            start.seq = 0  # before everything that was held
            for event in [start, *held]:
                self._write(event)

    def emit(
        self, name: str, *, ph: str = "i", req: str | None = None, step: int | None = None,
        cause: str | None = None, **args: Any,
    ) -> str:  # fmt: skip
        """Record one event and return its `ref`. Raises KeyError for a name that the vocabulary does not hold."""
        event = self._make(name, ph, req, step, cause, args, depth=2)
        if self._held is not None:
            self._held.append(event)
        else:
            self._write(event)
        return event.ref

    def flush(self) -> None:
        """Hand buffered events to the operating system (called when a process goes idle)."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write out and stop recording. May be called twice."""
        self.on = False
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _make(
        self, name: str, ph: str, req: str | None, step: int | None, cause: str | None, args: dict[str, Any], depth: int
    ) -> Event:
        frame = sys._getframe(depth)
        src = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        now = time.monotonic_ns()
        return Event(
            FORMAT_VERSION, next(self._seq), now, self._pid, self.proc, ph, name, VOCABULARY[name].phase, src,
            req, step, cause, args,
        )  # fmt: skip

    def _write(self, event: Event) -> None:
        if self._file is not None:
            self._file.write(encode_line(event))
            if event.ts - self._last_flush > FLUSH_INTERVAL_NS:
                self._last_flush = event.ts
                self._file.flush()
        if self._console:
            sys.stderr.write(event.console_line() + "\n")

    def _header(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "monotonic_ns": time.monotonic_ns(),
            "wall_clock_ns": time.time_ns(),
            "python": sys.version.split()[0],
            "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]] if sys.argv else [],
        }


trace = Recorder()
"""The recorder of this process."""
