"""CPU time that the API process spends on a token (`make bench`): HTTP, the front end of the engine, and the kernel's part of sending.

The clients are another process. With the echo engine the time of that engine is in it; with gpt2-tiny the engine is a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE
from pytest_benchmark.fixture import BenchmarkFixture
from server_under_test import ServerProcess

CLIENTS = Path(__file__).with_name("sse_clients.py")
TOKENS, SHORT = 450, 50  # of an answer: what they differ by is what tokens cost, without the request
MOST = 100  # µs a token at 16 streams, on a machine that is not idle


@pytest.fixture(scope="module", params=["echo", "gpt2-tiny"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    how = ["--engine", "echo"] if request.param == "echo" else []
    server = ServerProcess("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--disable-uvicorn-access-log", *how)
    try:
        server.wait_until_ready()
        ask(server, "/v1/completions", 16, 8)
        yield server
        server.process.terminate()
        assert server.wait() == 0
    finally:
        server.close()


def ask(server: ServerProcess, path: str, streams: int, tokens: int) -> dict[str, Any]:
    """What the clients report, and the CPU seconds that the API process took for them."""
    api = psutil.Process(server.process.pid)
    port = server.url.rpartition(":")[2]
    before = api.cpu_times()
    command = [sys.executable, CLIENTS, port, path, str(streams), str(tokens), "gpt2-tiny"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE).stdout)
    after = api.cpu_times()
    return report | {"cpu": after.user + after.system - before.user - before.system}


@pytest.mark.parametrize("streams", [1, 16])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_cpu_time_of_a_token(benchmark: BenchmarkFixture, server: ServerProcess, path: str, streams: int) -> None:
    rounds = 5
    short = [ask(server, path, streams, SHORT)["cpu"] for _ in range(rounds)]
    reports: list[dict[str, Any]] = []
    benchmark.pedantic(lambda: reports.append(ask(server, path, streams, TOKENS)), rounds=rounds)
    tokens = streams * (TOKENS - SHORT)
    cost = 1e6 * (min(report["cpu"] for report in reports) - min(short)) / tokens
    chunks = statistics.median(report["chunks"] for report in reports) / (streams * TOKENS)
    benchmark.extra_info["microseconds_per_token"] = round(cost, 1)
    benchmark.extra_info["milliseconds_per_request"] = round(1e3 * min(short) / streams, 1)
    benchmark.extra_info["chunks_per_token"] = round(chunks, 2)
    benchmark.extra_info["load_average"] = round(os.getloadavg()[0], 1)
    assert streams == 1 or cost < MOST
