"""A private server, for the length of a `with` block: `stages serve` in a process, on a free port, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from stage03_engine.args.processes import exit_reason
from stage03_engine.errors import EngineStartError

PATIENCE = 300.0  # seconds to wait for a start or an answer: only what hangs takes so long
END_SECONDS = 30.0  # for what a server does at once, unless it hangs
LAST_LINES = 12


class OwnServer:
    """`url` is where it listens; `log` are the lines that it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stderr is not None
        giving_up = threading.Timer(PATIENCE, kill_all, [self.process])
        giving_up.daemon = True  # Ctrl-C may come while it starts: the program's end must not wait for it
        try:
            giving_up.start()
            for line in self.process.stderr:
                self.log.append(line.rstrip())
                if " on http://" in line:
                    self._reader = threading.Thread(target=self._read_on, daemon=True)
                    self._reader.start()
                    return line.split(" on ")[-1].strip()
        finally:
            giving_up.cancel()
        raise EngineStartError("the server did not start:\n" + "\n".join(self.log[-LAST_LINES:]))

    def _read_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

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
        """SIGTERM, as an operator would; a recording is complete afterwards."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            kill_all(self.process)
            self.process.wait()
        if hasattr(self, "_reader"):
            self._reader.join(PATIENCE)


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
        command, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # Ctrl-C is for us; we stop the server
    )  # fmt: skip
    server = None
    try:
        server = OwnServer(process)
        yield server
    finally:
        if server is not None:
            server.stop()
        else:
            kill_all(process)
            process.wait()
        assert process.stderr is not None
        process.stderr.close()
