"""What else can happen while the server starts and ends: more signals, and those who watch the engine."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE
from server_under_test import SLOW_LOADING, ServerProcess

ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
StartServer = Callable[..., ServerProcess]
WATCHABLE = """
from stage02_server.features.page import routes as page_router
from stage03_engine.frontend.features import engine_watch
page_router.PAUSE_SECONDS = 0
class Loud:
    def qsize(self): return 0
    async def get(self): return [b"x" * 100_000]
async def start(self):
    return Loud()
engine_watch.EngineWatch.start = start
"""


def flood(server: ServerProcess, number: signal.Signals) -> int:
    """Signals without a pause, until the process has ended; its exit code."""
    while server.process.poll() is None:
        server.process.send_signal(number)
    return server.wait()


@pytest.mark.slow(keep="starting-15")
@pytest.mark.parametrize(("state", "number"), [("starting", signal.SIGTERM), ("ready", signal.SIGINT)])
def test_signals_without_end_change_nothing(
    start_server: StartServer, tmp_path: Path, state: str, number: signal.Signals
) -> None:
    """Not the exit code, and nothing is half done: the last word is the server's own."""
    patch = SLOW_LOADING.format(flag=str(tmp_path / "never")) if state == "starting" else ""
    server = start_server(*ECHO, patch=patch)
    if state == "ready":
        server.wait_until_ready()
    else:
        server.wait_for("HTTP is up")
    assert flood(server, number) == 0
    assert server.lines[-1].endswith("Stopped.") and not any("Traceback" in line for line in server.lines)


def test_events_of_an_engine_that_is_not_there_yet(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(*ECHO, patch=SLOW_LOADING.format(flag=str(tmp_path / "loaded")))
    url = server.wait_for(r"HTTP is up at (http://\S+) ")[1]
    early = httpx.get(f"{url}/v1/engine/events")
    assert early.status_code == 503 and early.json()["error"]["type"] == "ServiceUnavailableError"
    (tmp_path / "loaded").touch()
    server.wait_until_ready()
    assert httpx.get(f"{url}/v1/engine/events").status_code == 409  # the echo engine has no scheduler


def test_a_watcher_who_does_not_read_does_not_hold_up_the_end(start_server: StartServer) -> None:
    server = start_server(*ECHO, "--shutdown-timeout", "1000", patch=WATCHABLE)
    url = httpx.URL(server.wait_until_ready())
    with socket.socket() as deaf, httpx.stream("GET", f"{url}/v1/engine/events") as reads:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect((url.host, url.port))
        deaf.sendall(b"GET /v1/engine/events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert deaf.recv(12) == b"HTTP/1.1 200"
        pieces = reads.iter_raw()
        for _ in range(200):  # 20 MB, which no socket buffers for the other one
            next(pieces)
        server.process.terminate()
        for _ in pieces:  # to its proper end
            pass
        assert server.process.wait(timeout=PATIENCE) == 0


def test_a_disk_that_is_full_ends_the_trace_and_not_the_server(start_server: StartServer, tmp_path: Path) -> None:
    patch = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))"
    server = start_server(*ECHO, "--trace", str(tmp_path), patch=patch)
    url = server.wait_until_ready()
    for _ in range(2):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a b", "max_tokens": 50, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 50
    server.process.terminate()
    assert server.wait() == 0
    assert len([line for line in server.lines if line.startswith("stages: the trace ends here: ")]) == 1
    assert not any("Traceback" in line for line in server.lines)
    [file] = tmp_path.iterdir()
    assert file.stat().st_size == 5000
