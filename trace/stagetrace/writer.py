"""Where recorded lines go: a file per process, written by a thread of its own, and the console."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from stagetrace.private import FILE_MODE, FOLDER_MODE
from stagetrace.text import printable

WRITE_INTERVAL_SECONDS = 0.1  # kill -9 loses at most what was recorded in this time
MIN_MAX_BYTES = 1 << 16  # smaller files would hold little besides their own headers
CONSOLE_BYTES = 4096  # a pipe takes this many bytes in one piece (PIPE_BUF), whoever else writes to it


def write_console_line(text: str) -> None:
    """One line to stderr in one write, so that the lines of several processes never mix; a longer one is cut, with "...".

    It goes past Python's own buffer, where another thread's half line could lie. Raises OSError if stderr is closed.
    """
    line = printable(text).encode("utf-8", "backslashreplace")
    if len(line) >= CONSOLE_BYTES:
        line = line[: CONSOLE_BYTES - 4] + b"..."
    rest = memoryview(line + b"\n")
    while rest:
        try:
            rest = rest[os.write(2, rest) :]
        except BlockingIOError:  # the terminal was made non-blocking, and it is full
            select.select([], [2], [])


class TraceFile:
    """`DIR/<name>.jsonl`. Lines wait in memory and are written in one piece every 0.1 s, and by `flush`.

    With `max_bytes` there are at most two files: a file that would pass half of it becomes `<name>.1.jsonl`, in place of the
    one before, and a new one begins. Each begins with the line `header(part)`, part = 0, 1, 2, ... Lines stay in the order of
    the `add` calls. A disk that is full ends the recording, not the process. Folder and files are for their owner alone.
    """

    def __init__(self, folder: Path, name: str, header: Callable[[int], bytes], max_bytes: int | None = None) -> None:
        """Creates the folder if it is missing. Raises OSError if it cannot be written."""
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        self._path, self._older = folder / f"{name}.jsonl", folder / f"{name}.1.jsonl"
        self._header, self._limit = header, None if max_bytes is None else max_bytes // 2
        self._part = 0
        self._lines: deque[bytes] = deque()  # one end is appended to, the other taken from: both are atomic
        self.add = self._lines.append  # takes one line, without its newline
        self._writing = threading.RLock()
        self._stop = threading.Event()
        self._open()
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Hand what waits to the operating system."""
        with self._writing:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if not lines or self._fd < 0:
                return
            try:
                self._write(b"\n".join(lines) + b"\n")
            except OSError as error:
                self._close_file()
                print(f"stages: the trace ends here: {error.strerror or error}", file=sys.stderr)

    def close(self) -> None:
        """Write what waits and end the thread. May be called twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.flush()
        self._close_file()

    def _run(self) -> None:
        while not self._stop.wait(WRITE_INTERVAL_SECONDS):
            self.flush()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        self._size = os.fstat(self._fd).st_size
        self._write_all(self._header(self._part))
        self._empty_size = self._size

    def _close_file(self) -> None:
        with self._writing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _write(self, data: bytes) -> None:
        """Write whole lines, and begin a new file wherever the next line would pass the limit."""
        while self._limit is not None and self._size + len(data) > self._limit:
            end = data.rfind(b"\n", 0, max(0, self._limit - self._size)) + 1
            if not end and self._size == self._empty_size:  # a line that fits into no file is written all the same
                end = data.find(b"\n") + 1
            self._write_all(data[:end])
            data = data[end:]
            if not data:
                return
            self._rotate()
        self._write_all(data)

    def _rotate(self) -> None:
        os.close(self._fd)
        os.replace(self._path, self._older)
        self._part += 1
        self._open()

    def _write_all(self, data: bytes) -> None:
        while data:
            written = os.write(self._fd, data)
            self._size += written
            data = data[written:]
