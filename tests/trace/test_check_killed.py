"""`check` on recordings of real servers: stopped as they should be, and killed in the middle of an answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stagetrace import read_run
from stagetrace.check.invariants import check


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
    server = ServerProcess(*flags, "--trace", str(tmp_path / "run"))
    server.wait_until_ready()
    yield server
    server.close()


BODY = {"prompt": "ROMEO:", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}


def killed_midway(url: str, victim: int, run: Path) -> None:
    """Kill a process in the middle of a long streamed answer, after 120 lines of it, and once the process has recorded the request: it
    writes its events ten times a second, and an answer may be shorter than that."""
    killed = False
    with contextlib.suppress(httpx.HTTPError):
        while not killed:
            with httpx.stream("POST", url + "/v1/completions", json=BODY, timeout=PATIENCE) as response:
                for number, line in enumerate(response.iter_lines()):
                    if not killed and number >= 120 and line.startswith('data: {"id"'):
                        killed = recorded(json.loads(line[6:])["id"], victim, run)
                        if killed:
                            os.kill(victim, signal.SIGKILL)


def recorded(req: str, pid: int, run: Path) -> bool:
    """Has the process written an event of this request?"""
    return any(req in path.read_text(encoding="utf-8") for path in run.glob(f"*{pid}*.jsonl"))


@pytest.mark.slow
def test_a_server_that_was_stopped_leaves_a_consistent_recording(server: ServerProcess, tmp_path: Path) -> None:
    assert len(httpx.post(server.url + "/v1/completions", json=BODY, timeout=PATIENCE).text.splitlines()) > 300
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    report = check(tmp_path / "run")
    assert report.consistent, (report.deaths, [str(finding) for finding in report.findings])
    assert report.events > 1000 and len(report.processes) == 2


@pytest.mark.parametrize("who", ["engine", "API server"])
def test_after_kill_9_it_is_said_what_is_missing_and_why(server: ServerProcess, who: str, tmp_path: Path) -> None:
    [engine] = [
        p
        for p in psutil.Process(server.process.pid).children()
        if " ".join(p.cmdline()).startswith("stages::EngineCore")
    ]
    victim = engine.pid if who == "engine" else server.process.pid
    killed_midway(server.url, victim, tmp_path / "run")
    server.wait()
    psutil.wait_procs([engine], timeout=PATIENCE)
    report = check(tmp_path / "run")
    killed = [death for death in report.deaths if f"(pid {victim}) was killed" in death]
    assert len(killed) == 1 and "its last recorded event is" in killed[0], report.deaths
    texts = [str(finding) for finding in report.findings]
    assert any("never ended" in text for text in texts), texts
    assert all(f"(pid {victim})" in finding.explained for finding in report.findings), texts
    other = "EngineCore" if who == "API server" else "APIServer"
    survivors = [event for event in read_run(tmp_path / "run").events if event.proc.startswith(other)]
    assert len(survivors) > 300, "what the other process recorded still reads"
