"""One real run to look at: a server with both its processes under the monitor, and one streamed request, or its start alone."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx

from stage01_cli.tools.own_server import END_SECONDS, OwnServer, own_server
from stage01_cli.tools.walk.notes import Process, begin_window, monitored, read_notes
from stage03_engine.errors import EngineStartError, StagesError
from stagetrace import Event, Recording

REQUEST_ID = "walk"
START, REQUEST, AFTER = 0, 1, 2
"""The parts of a run, as the monitor numbers them."""
SETTLE_SECONDS = 0.2  # for what a server still does when it has said that it is ready
OWN_ERROR = "stages: error: "


class WalkError(StagesError):
    """The server did not start, refused the request, or died."""


@dataclass(frozen=True)
class Wish:
    """What to run."""

    model: str
    prompt: str | None  # None: only the start
    max_tokens: int = 8
    port: int = 0
    flags: tuple[str, ...] = ()  # more of `serve`


@dataclass(frozen=True)
class Run:
    """What was seen of it."""

    processes: list[Process]
    events: list[Event]
    windows: dict[int, tuple[int, int]]  # START and REQUEST: from when to when, as time.monotonic_ns() says
    text: str  # of the answer


def make(wish: Wish) -> Run:
    """Start a server, ask it once, end it, and read what its processes noted. Raises WalkError."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name, _sigterm_is_ctrl_c():
        folder = Path(name)
        flags = ("--port", str(wish.port), "--trace", str(folder / "trace"), *wish.flags)
        environment = monitored(folder, os.environ) | {"WALK_PARENT": str(os.getpid())}
        marks, text = [time.monotonic_ns()], ""
        try:
            with own_server(wish.model, flags, environment) as server:
                _health(server)
                marks.append(time.monotonic_ns())
                if wish.prompt is not None:
                    time.sleep(SETTLE_SECONDS)
                    begin_window(folder, REQUEST)
                    marks.append(time.monotonic_ns())
                    body = {"prompt": wish.prompt, "max_tokens": wish.max_tokens, "temperature": 0}
                    text = "".join(server.complete(body, REQUEST_ID))
                begin_window(folder, AFTER)
        except EngineStartError as error:
            raise WalkError(_reason(str(error))) from error
        return _read(folder, marks, text)


def _read(folder: Path, marks: list[int], text: str) -> Run:
    """`marks`: when the server was started, when it was ready and, if it was, when it was asked."""
    processes = read_notes(folder)
    events = sorted(Recording(folder / "trace"), key=lambda event: event.ts)
    if len(processes) < 2:
        raise WalkError("the server's processes left no notes: does PYTHONPATH, or python -I, keep sitecustomize out?")
    began, ready, *asked = marks
    # The question for /health is a request already.
    windows = {START: (began, max(event.ts for event in events if event.phase < 6 and event.ts < ready))}
    for mark in asked:  # from its first byte; its last events come when the client has its answer
        begin = min(note.time for process in processes for note in process.notes if note.time >= mark)
        windows[REQUEST] = begin, max(event.ts for event in events if event.phase >= 6)
    return Run(processes, events, windows, text)


def _health(server: OwnServer) -> None:
    """A start ends with this answer."""
    try:
        answer = httpx.get(f"{server.url}/health", trust_env=False, timeout=END_SECONDS)
    except httpx.HTTPError as error:
        raise server.died(error) from error
    if answer.status_code != 200:
        raise WalkError(f"the server is not healthy: {answer.text[:200]}")


def _reason(text: str) -> str:
    """The server's own error, out of the end of its log; or of an error object, its message."""
    errors = [line for line in text.splitlines() if line.startswith(OWN_ERROR)]
    if errors:
        return f"the server did not start: {errors[-1].removeprefix(OWN_ERROR)}"
    start, brace, rest = text.partition("{")
    try:
        return start + str(json.loads(brace + rest)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text


@contextmanager
def _sigterm_is_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the server too, instead of this process alone."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
