"""The states of the server, seen from outside, and how it ends."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE
from server_under_test import DYING_ENGINE, SLOW_LOADING, InProcessServer, RecordingEcho, ServerProcess

from stagetrace import read_run

ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
StartServer = Callable[..., ServerProcess]
SLOW_STEPS = "import stage02_server.features.echo_engine as e; e.EchoCoreClient.__init__.__defaults__ = (0.05,)"


def state_of(url: str) -> str:
    """What /health says, which /metrics must say too."""
    answer = httpx.get(f"{url}/health")
    if answer.status_code == 200:
        assert answer.content == b""
        state = "ready"
    else:
        assert answer.status_code == 503 and answer.json()["error"]["code"] == 503
        state = answer.json()["state"]
    metrics = httpx.get(f"{url}/metrics").text
    for other in ("starting", "ready", "draining", "stopped", "failed"):
        assert f'stages:server_state{{state="{other}"}} {float(other == state)}' in metrics
    return state


def stream(url: str, max_tokens: int) -> Iterator[str]:
    body = {"prompt": "a b c d", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        yield from (line for line in response.iter_lines() if line)


def test_starting_ready_draining_stopped(start_server: StartServer, tmp_path: Path) -> None:
    loaded, traces = tmp_path / "loaded", tmp_path / "traces"
    patch = SLOW_LOADING.format(flag=str(loaded)) + SLOW_STEPS
    server = start_server(*ECHO, "--trace", str(traces), patch=patch)
    url = server.wait_for(r"HTTP is up at (http://\S+) ")[1]
    assert state_of(url) == "starting"
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and "starting" in refused.json()["error"]["message"]
    loaded.touch()
    server.wait_until_ready()
    assert state_of(url) == "ready"
    lines = stream(url, max_tokens=30)
    next(lines)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("SIGTERM: finishing 1 requests")
    assert state_of(url) == "draining"
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
    *_, last, done = lines
    assert '"finish_reason":"length"' in last and done == "data: [DONE]"
    assert server.wait() == 0
    states = [event.args["state"] for event in read_run(traces).events if event.name == "server.state"]
    assert states == ["starting", "ready", "draining", "stopped"]


def test_a_client_that_never_reads_cannot_keep_the_server(start_server: StartServer) -> None:
    server = start_server(*ECHO, "--shutdown-timeout", "1000")
    url = httpx.URL(server.wait_until_ready())
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect((url.host, url.port))
        body = b'{"prompt": "a", "max_tokens": 500, "logprobs": 20, "n": 128, "temperature": 1, "stream": true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        deaf.sendall(head % len(body) + body)
        assert deaf.recv(12) == b"HTTP/1.1 200"
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: finishing 1 requests")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=PATIENCE) == 0


def test_a_failed_engine_is_the_state_failed(start_server: StartServer) -> None:
    server = start_server(*ECHO, patch=DYING_ENGINE)
    url = server.wait_until_ready()
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
    assert state_of(url) == "failed"
    assert server.wait() == 1


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_says_the_state_in_json(make_server: Callable[..., InProcessServer], path: str) -> None:
    server = make_server(RecordingEcho())
    assert server.request("GET", path).content == b""
    server.app.state.services.gate.draining = True
    answer = server.request("GET", path)
    assert answer.status_code == 503 and answer.json()["state"] == "draining"
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
