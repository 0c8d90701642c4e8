"""One real run to look at: a server with both its processes under the monitor, and one streamed request, or its start alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx

from stage01_cli.tools.walk.notes import Process, begin_window, monitored, read_notes
from stage03_engine.args.processes import exit_reason
from stage03_engine.errors import StagesError
from stagetrace import Event, Recording

REQUEST_ID = "walk"
START, REQUEST, AFTER = 0, 1, 2
"""The parts of a run, as the monitor numbers them."""
END_SECONDS = 30.0  # for the server to end when it is asked to
SETTLE_SECONDS = 0.2  # for what a server still does when it has said that it is ready
LAST_LINES = 50  # of the server's log, for the reason if it ends by itself


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


class Server:
    """`stages serve` as a child of this process."""

    def __init__(self, wish: Wish, folder: Path) -> None:
        words = ["serve", wish.model, "--host", "127.0.0.1", "--port", str(wish.port), "--trace", str(folder / "trace")]
        self._log: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stage01_cli", *words, *wish.flags], env=monitored(folder, os.environ),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip

    def url(self) -> str:
        """Wait until it is ready. Raises WalkError with its own last words if it ends instead."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            if " Serving " in line and " on http://" in line:
                threading.Thread(target=self._log.extend, args=(self._process.stderr,), daemon=True).start()
                return line.rpartition(" on ")[2].strip()
        raise WalkError(f"the server did not start: {self.last_words()}")

    def last_words(self) -> str:
        """The error that it printed, or else how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        errors = [line.strip() for line in self._log if "error: " in line]
        if errors:
            return errors[-1].removeprefix("stages: error: ")
        code = self._process.returncode
        return "it does not answer" if code is None else f"it ended with {exit_reason(code)}"

    def end(self) -> None:
        """Ask it to end, and wait; the engine ends with it. May be called twice."""
        try:
            self._process.terminate()
            self._process.wait(END_SECONDS)
        finally:  # a second Ctrl-C, or it hangs: the engine's process ends when this one is gone
            self._process.kill()
            self._process.wait()


def make(wish: Wish) -> Run:
    """Start a server, ask it once, end it, and read what its processes noted. Raises WalkError."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name, _sigterm_is_ctrl_c():
        folder = Path(name)
        marks, text = [time.monotonic_ns()], ""
        server = Server(wish, folder)
        try:
            url = server.url()
            _health(url, server)
            marks.append(time.monotonic_ns())
            if wish.prompt is not None:
                time.sleep(SETTLE_SECONDS)
                begin_window(folder, REQUEST)
                marks.append(time.monotonic_ns())
                text = _ask(url, wish, server)
            begin_window(folder, AFTER)
        finally:
            server.end()
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


def _health(url: str, server: Server) -> None:
    """A start ends with this answer."""
    try:
        answer = httpx.get(f"{url}/health", trust_env=False, timeout=END_SECONDS)
    except httpx.HTTPError as error:
        raise _died(error, server) from error
    if answer.status_code != 200:
        raise WalkError(f"the server is not healthy: {answer.text[:200]}")


def _ask(url: str, wish: Wish, server: Server) -> str:
    """One streamed completion, and its text."""
    body = {"prompt": wish.prompt, "max_tokens": wish.max_tokens, "temperature": 0, "stream": True}
    pieces: list[str] = []
    try:
        with (
            httpx.Client(trust_env=False, timeout=None) as client,
            client.stream("POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": REQUEST_ID}) as answer,
        ):
            if answer.status_code != 200:
                raise WalkError(f"the server refused the request: {_message(answer.read())}")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    except httpx.HTTPError as error:
        raise _died(error, server) from error
    for line in lines:
        if line == "[DONE]":
            return "".join(pieces)
        event = json.loads(line)
        if "error" in event:
            raise WalkError(f"the server broke the answer off: {_message(line.encode())}")
        pieces += [choice["text"] for choice in event["choices"]]
    raise WalkError(f"the server broke the answer off: {server.last_words()}")


def _died(error: Exception, server: Server) -> WalkError:
    return WalkError(f"the server died during the request ({type(error).__name__}): {server.last_words()}")


def _message(body: bytes) -> str:
    """Of OpenAI's error object, or the body's beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


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
