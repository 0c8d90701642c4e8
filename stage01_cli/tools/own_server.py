"""A private server, for the length of a `with` block: `stages serve` in a process, on a free port, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from stage03_engine.args.processes import exit_reason
from stage03_engine.errors import EngineStartError

PATIENCE = 300.0  # seconds to wait for a start or an answer: only what hangs takes so long
END_SECONDS = 30.0  # for what a server does at once, unless it hangs
LINGER_SECONDS = 5.0  # for processes that end with the server, and for the rest of the log
LAST_LINES = 12
LOG_LINES, LOG_WIDTH = 4000, 2000
"""Of the log so many lines are kept, the last ones, and of so many characters: a server may run code that prints without end."""
MARK = "[course]"
"""What a door says, and the engine of an exercise, begins with it (course/); so many of these lines are kept beside the others."""


class OwnServer:
    """`url` is where it listens. `log` is the end of what it has written so far, `marked` the lines of it that begin with MARK."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._log, self._marked = deque[str](maxlen=LOG_LINES), deque[str](maxlen=LOG_LINES)
        self._writing = threading.Lock()
        self.url = self._wait()

    @property
    def log(self) -> list[str]:
        """The last LOG_LINES lines."""
        with self._writing:
            return list(self._log)

    @property
    def marked(self) -> list[str]:
        """The last LOG_LINES lines that begin with MARK."""
        with self._writing:
            return list(self._marked)

    def _lines(self) -> Iterator[str]:
        """What it writes, to the end: the pipe must never be full. A longer line than LOG_WIDTH comes in pieces."""
        assert self.process.stderr is not None
        while line := self.process.stderr.readline(LOG_WIDTH):
            with self._writing:
                self._log.append(line.rstrip())
                if line.startswith(MARK):
                    self._marked.append(line.rstrip())
            yield line

    def _wait(self) -> str:
        giving_up = threading.Timer(PATIENCE, kill_all, [self.process])
        giving_up.daemon = True  # Ctrl-C may come while it starts: the program's end must not wait for it
        try:
            giving_up.start()
            for line in self._lines():
                if " on http://" in line:
                    self._reader = threading.Thread(target=self._read_on, daemon=True)
                    self._reader.start()
                    return line.split(" on ")[-1].strip()
        finally:
            giving_up.cancel()
        raise EngineStartError("the server did not start:\n" + "\n".join(self.log[-LAST_LINES:]))

    def _read_on(self) -> None:
        for _ in self._lines():
            pass

    def stream(self, body: Mapping[str, Any], request_id: str, path: str = "/v1/completions") -> Iterator[str]:
        """The data of each server-sent event of a streamed answer. Raises EngineStartError for any status but 200, and if the server dies."""
        import httpx

        headers = {"X-Request-Id": request_id}
        try:
            with (
                httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False) as client,  # it loads no certificates
                client.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    raise EngineStartError(f"the server answered {answer.status_code}: {answer.read().decode()}")
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        yield line.removeprefix("data: ")
        except httpx.HTTPError as error:
            raise self.died(error) from error

    def events(self, body: Mapping[str, Any], request_id: str) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed completion. Raises EngineStartError if it ends with an error, or in the middle."""
        for data in self.stream(body, request_id):
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineStartError(f"the answer ended with an error: {chunk['error'].get('message')}")
            yield chunk
        raise self.died(EOFError())

    def complete(self, body: Mapping[str, Any], request_id: str) -> Iterator[str]:
        """The text of a streamed completion, piece by piece. Raises as `events` does."""
        for chunk in self.events(body, request_id):
            yield from (choice["text"] for choice in chunk["choices"])

    def died(self, error: Exception) -> EngineStartError:
        """What to raise when the connection broke: with how the server's process ended."""
        try:
            ended = f"it ended with {exit_reason(self.process.wait(END_SECONDS))}"
        except subprocess.TimeoutExpired:
            ended = "it does not answer"
        return EngineStartError(f"the server died during the request ({type(error).__name__}): {ended}")

    def stop(self) -> None:
        """SIGTERM, as an operator would; a recording is complete afterwards. What the server has started ends with it, or is killed."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE)
            self._reader.join(LINGER_SECONDS)  # the log ends when all have ended
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_all(self.process)
            self.process.wait()
            self._reader.join(LINGER_SECONDS)

    def close(self) -> None:
        """Close the log, unless a process that has left the group still holds its other end."""
        if not self._reader.is_alive() and self.process.stderr is not None:
            self.process.stderr.close()


def kill_all(process: subprocess.Popen[str]) -> None:
    """End the server and its engine. An engine that is stuck in user code while it imports does not notice that the server has ended."""
    process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def own_server(model: str, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[OwnServer]:
    """Start it with these flags and additional environment variables; stop it however the block ends. Raises EngineStartError."""
    command = [sys.executable, "-m", "stage01_cli", "serve", model, "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(
        command, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,  # Ctrl-C is for us; we stop the server
    )  # fmt: skip
    server = None
    try:
        server = OwnServer(process)
        yield server
    finally:
        if server is not None:
            server.stop()
            server.close()
        else:
            kill_all(process)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
