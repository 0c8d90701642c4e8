"""The watch on the event loop: what holds it is named, counted and told, and what does not is not."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE, wait_until
from prometheus_client import CollectorRegistry, generate_latest
from server_under_test import ServerProcess

from stage02_server.features.hardening.loop_watch import HEADER, Hold, HoldReport, LoopWatch

ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
HOLDING = """
import time
import stage02_server.routes as routes
async def hold_in_python():
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
async def hold_in_c():
    start = time.monotonic()
    while time.monotonic() - start < 1:
        sum(range(20_000_000))
async def in_a_task(request: routes.Request):
    from stage02_server.streaming import run_until_disconnect
    await run_until_disconnect(request.receive, hold_in_python())
for held in (hold_in_python, hold_in_c, in_a_task):
    routes.router.get("/v1/" + held.__name__)(held)
"""


def watched(limit: float, hold: Callable[[threading.Event], None], monkeypatch: pytest.MonkeyPatch) -> list[Hold]:
    """What the watch tells of a request that calls `hold` with an event that is set when the watch has looked."""
    told: list[Hold] = []
    looked = threading.Event()
    look = LoopWatch._look

    def noting(self: LoopWatch) -> tuple[str, str]:
        found = look(self)
        looked.set()
        return found

    monkeypatch.setattr(LoopWatch, "_look", noting)

    async def request() -> None:
        hold(looked)

    async def run() -> None:
        watch = LoopWatch(limit, told.append)
        watch.start()
        await asyncio.create_task(request(), name="POST /v1/x cmpl-7")
        while looked.is_set() and not told:
            await asyncio.sleep(0)
        watch.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    return told


def test_a_hold_has_the_name_of_its_request_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(looked: threading.Event) -> None:
        while not looked.is_set():
            pass

    [hold] = watched(0.01, spin, monkeypatch)
    assert hold.request == "POST /v1/x cmpl-7" and hold.seconds >= 0.01
    assert "spin" in hold.where and "request" in hold.where and "test_loop_watch.py" in hold.where


def test_what_only_waits_is_no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(PATIENCE, lambda looked: None, monkeypatch) == []


def test_a_blocked_loop_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(looked: threading.Event) -> None:
        looked.wait(PATIENCE)

    [hold] = watched(0.05, wait, monkeypatch)
    assert hold.cpu_seconds < hold.seconds


def test_holds_are_counted_and_forgotten(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registry, now = CollectorRegistry(), 100.0
    monkeypatch.setattr("stage02_server.features.hardening.loop_watch.time.monotonic", lambda: now)
    report = HoldReport(registry)
    assert report.headers() == {}
    with caplog.at_level(logging.WARNING):
        for seconds in (0.5, 3.0):
            report.told(Hold(seconds, 0.1, "GET /x\n", "a.py:1 f", now))
    assert report.headers() == {HEADER: "3.000"} and len(caplog.records) == 2
    now += 61
    assert report.headers() == {}
    assert b"stages:event_loop_held_seconds_count 2.0" in generate_latest(registry)


@pytest.mark.slow
def test_the_server_tells_of_it(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """In the log, the metric, the trace and /health; code in C that keeps the interpreter's lock too."""
    server = start_server(*ECHO, "--trace", str(tmp_path), patch=HOLDING)
    server.held_by_design = True
    server.wait_until_ready()
    with httpx.Client(base_url=server.url) as client:
        answer = client.get("/health")
        assert "x-event-loop-held" not in answer.headers
        for name, where in (
            ("hold_in_python", "hold_in_python"), ("hold_in_c", "hold_in_c"), ("in_a_task", "hold_in_python")
        ):  # fmt: skip
            client.get("/v1/" + name)
            line = server.wait_for(r"The event loop was held for .*")[0]
            assert f"by GET /v1/{name}: " in line and where in line
        answer = client.get("/health")
        assert answer.status_code == 200 and answer.content == b"" and float(answer.headers["x-event-loop-held"]) > 0.25
        metrics = client.get("/metrics").text
        wait_until(lambda: "stages:event_loop_held_seconds_count" in client.get("/metrics").text, metrics)
    server.process.terminate()
    assert server.wait() == 0
    events = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert {event["args"]["request"] for event in events if event["name"] == "loop.held"} >= {"GET /v1/hold_in_c"}


@pytest.mark.slow
def test_no_watch(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(*ECHO, "--event-loop-held-seconds", "0", patch=HOLDING)
    server.wait_until_ready()
    assert "x-event-loop-held" not in httpx.get(server.url + "/health").headers
    httpx.get(server.url + "/v1/hold_in_python")
    assert "held_seconds" not in httpx.get(server.url + "/metrics").text
