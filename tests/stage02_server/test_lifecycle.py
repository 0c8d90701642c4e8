"""The states of the server, seen from outside, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from patience import PATIENCE
from server_under_test import DYING_ENGINE, SLOW_LOADING, InProcessServer, RecordingEcho, ServerProcess

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.admin.engine_stall import EngineStall, StallLifecycle
from stage03_engine.errors import ConfigError
from stage03_engine.messages import EngineCoreOutputs
from stagetrace import read_run

ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
StartServer = Callable[..., ServerProcess]
SLOW_STEPS = (
    "import stage02_server.features.echo_engine.echo_engine as e; e.EchoCoreClient.__init__.__defaults__ = (0.05,)"
)


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
    for other in ("starting", "ready", "stalled", "draining", "stopped", "failed"):
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


def test_health_says_the_state_in_json(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server(RecordingEcho())
    assert server.request("GET", "/health").content == b""
    server.app.state.services.gate.draining = True
    answer = server.request("GET", "/health")
    assert answer.status_code == 503 and answer.json()["state"] == "draining"
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"


class StuckEcho(RecordingEcho):
    """An engine whose next step can be made to block."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await super().get_output_async()
        await self.free.wait()
        return outputs


async def until_health_is(server: InProcessServer, status: int) -> httpx.Response:
    while (answer := await server.send("GET", "/health")).status_code != status:
        await asyncio.sleep(0.01)
    return answer


@pytest.mark.parametrize("gives_up", [False, True])
def test_an_engine_whose_step_blocks_is_stalled_until_it_goes_on(
    gives_up: bool, make_server: Callable[..., InProcessServer], caplog: pytest.LogCaptureFixture
) -> None:
    client = StuckEcho()
    server = make_server(client, engine_stall_seconds=0.05)

    async def life() -> None:
        assert (await server.send("GET", "/health")).status_code == 200, "it is idle"
        client.free.clear()
        asked = asyncio.create_task(server.send("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 2}))
        answer = await until_health_is(server, 503)
        assert answer.json()["state"] == "stalled"
        assert "has not answered for" in (message := answer.json()["error"]["message"])
        assert "--engine-stall-seconds" in message
        assert 'stages:server_state{state="stalled"} 1.0' in (await server.send("GET", "/metrics")).text
        assert (await server.send("GET", "/v1/models")).status_code == 200, "who needs no engine is served"
        if gives_up:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            while server.engine.num_unfinished_requests:
                await asyncio.sleep(0.01)
            assert (await server.send("GET", "/health")).status_code == 503, "it has not reacted to the abort"
        client.free.set()
        if not gives_up:
            assert (await asked).status_code == 200
        await until_health_is(server, 200)

    server.run(life())
    said = [
        record.getMessage()
        for record in caplog.records
        if "stand" in record.getMessage() or "503" in record.getMessage()
    ]
    assert "/health answers 503" in said[0] and "no longer stands still" in said[1]


def test_an_engine_owes_something_from_the_oldest_request_or_its_last_sign_on(server: InProcessServer) -> None:
    now = 1000.0
    stall = EngineStall(server.engine, 10.0, lambda: now)
    states = server.engine.output_processor.request_states
    state = SimpleNamespace(request=SimpleNamespace(arrival_time=5000.0))
    now = 5009.0
    assert stall.seconds == 0.0 and not stall.is_too_long, "an idle engine is healthy, however long"
    states["r"] = state  # type: ignore[assignment]
    try:
        assert stall.seconds == 9.0 and not stall.is_too_long
        now = 5011.0
        assert stall.seconds == 11.0 and stall.is_too_long
        server.engine.last_outputs_at = 5011.0
        now = 5020.0
        assert stall.seconds == 9.0, "its last sign of life counts"
    finally:
        del states["r"]
    now = 5022.0
    assert stall.is_too_long, "nobody waits any more, but it has not reacted to that"
    server.engine.last_outputs_at = 5022.0
    now = 9999.0
    assert stall.seconds == 0.0


def test_the_limit_of_a_standstill_may_be_off_and_is_checked(make_server: Callable[..., InProcessServer]) -> None:
    assert isinstance(make_server().app.state.services.lifecycle, StallLifecycle)
    assert not isinstance(make_server(engine_stall_seconds=0).app.state.services.lifecycle, StallLifecycle)
    for wrong in (-1.0, float("nan")):  # the parser refuses infinity
        with pytest.raises(ConfigError, match="engine_stall_seconds"):
            FrontendArgs(engine_stall_seconds=wrong).check()
