"""GET /v1/engine/events: the scheduler's events as they happen, without prompts, and never in the way of anything."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE
from server_under_test import InProcessServer, ServerProcess
from watcher import Watcher

from stage03_engine.core.features.scheduler_watch.scheduler_watch import SHOWN

ASK = {"prompt": "KING RICHARD: a secret", "max_tokens": 6, "temperature": 0}


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def run(*args: str) -> ServerProcess:
        servers.append(ServerProcess("gpt2-tiny", "--port", "0", *args))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield run
    for server in servers:
        server.close()


def check_one_request(watcher: Watcher, url: str) -> None:
    watcher.wait_for("sched.state")
    answer = httpx.post(url + "/v1/completions", json=ASK).json()
    watcher.wait_for("sched.finished")
    names = [event["name"] for event in watcher.events]
    assert names[0] == "sched.state" and set(names) <= set(SHOWN)
    assert {event["req"] for event in watcher.events if "req" in event} == {answer["id"] + "-0"}
    assert names.count("sched.token") == answer["usage"]["completion_tokens"] == 6
    assert names.count("sched.output") == 6
    for event in watcher.events:
        assert set(event.get("args", {})) == set(SHOWN[event["name"]])
    assert "secret" not in watcher.text and "KING" not in watcher.text


def test_one_request_without_a_trace_and_the_end_of_the_server(start: Callable[..., ServerProcess]) -> None:
    """A stream without an end of its own does not keep the server from stopping."""
    server = start("--shutdown-timeout", "1000")
    watcher = Watcher(server.url)
    check_one_request(watcher, server.url)
    server.process.send_signal(signal.SIGTERM)
    assert watcher.ended.wait(PATIENCE)
    assert server.wait() == 0


def test_beside_a_recording_with_prompts(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """What the recording may hold, a watcher still does not see; and the recording is complete."""
    server = start("--trace", str(tmp_path), "--trace-prompts")
    watcher = Watcher(server.url)
    check_one_request(watcher, server.url)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    recorded = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert "a secret" in recorded
    for name in ("sched.state", "sched.token", "model.forward", "engine.stopped"):
        assert f'"name":"{name}"' in recorded


def test_the_engine_inside_the_api_process_tells_the_same(start: Callable[..., ServerProcess]) -> None:
    server = start("--in-process")
    check_one_request(Watcher(server.url), server.url)


def test_the_stream_ends_with_the_engine(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start("--trace", str(tmp_path))
    watcher = Watcher(server.url)
    watcher.wait_for("sched.state")
    os.kill(watcher.events[0]["pid"], signal.SIGKILL)
    assert watcher.ended.wait(PATIENCE)
    assert server.wait() == 1


def test_an_idle_engine_tells_a_newcomer_and_a_reset(start: Callable[..., ServerProcess]) -> None:
    server = start("--server-dev-mode")
    httpx.post(server.url + "/v1/completions", json=ASK | {"prompt": "word " * 40})
    first = Watcher(server.url)
    first.wait_for("sched.state")
    assert first.events[0]["args"]["cached"] and first.events[0]["step"] == 6
    second = Watcher(server.url)
    second.wait_for("sched.state")
    httpx.post(server.url + "/reset_prefix_cache").raise_for_status()
    second.wait_for("kv.reset")
    first.wait_for("kv.reset")


def test_an_engine_without_scheduler_refuses() -> None:
    server = InProcessServer()
    answer = server.request("GET", "/v1/engine/events")
    server.close()
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "ConflictError" and "no scheduler" in answer.json()["error"]["message"]


@contextmanager
def served() -> Iterator[InProcessServer]:
    server = InProcessServer()
    yield server
    server.close()


def test_the_page_may_run_its_own_script_only() -> None:
    with served() as server:
        answer = server.request("GET", "/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", answer.text), "the page asks somebody else"
    assert "@@" not in answer.text and answer.text.count("<script") == 1
