"""One API server and two (`make bench`): 16 streams on the echo engine, where HTTP and text are all the work.

The time that the clients see depends on the cores that are left over: on two, the clients take one. What a second server can bring
where there are more is in the CPU time of the busiest server, which bounds the throughput.
"""

from __future__ import annotations

import json
import os
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
STREAMS, TOKENS = 16, 450


@pytest.fixture(scope="module", params=[1, 2])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    how = ["--host", "127.0.0.1", "--port", "0", "--engine", "echo", "--disable-uvicorn-access-log"]
    server = ServerProcess("gpt2-tiny", *how, "--api-server-count", str(request.param))
    try:
        for _ in range(request.param):
            server.wait_until_ready()
        yield server
        server.process.terminate()
        assert server.wait() == 0
    finally:
        server.close()


def cpu_seconds(server: ServerProcess) -> list[float]:
    """Of each process that serves; the launcher of several only waits."""
    root = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in root.children() or [root]]
    return [time.user + time.system for time in times]


def test_sixteen_streams(benchmark: BenchmarkFixture, server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, CLIENTS, port, "/v1/completions", str(STREAMS), str(TOKENS), "gpt2-tiny"]
    reports: list[dict[str, Any]] = []

    def ask() -> None:
        before = cpu_seconds(server)
        done = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
        spent = [after - start for after, start in zip(cpu_seconds(server), before)]
        reports.append(json.loads(done.stdout) | {"all": sum(spent), "busiest": max(spent)})

    benchmark.pedantic(ask, rounds=5, warmup_rounds=1)
    tokens = STREAMS * TOKENS
    benchmark.extra_info["tokens_per_second"] = round(tokens / min(each["seconds"] for each in reports))
    benchmark.extra_info["milliseconds_to_first_chunk"] = round(1e3 * min(each["ttft"] for each in reports), 1)
    for which in ("all", "busiest"):
        spent = sorted(each[which] for each in reports)[len(reports) // 2]
        benchmark.extra_info[f"cpu_microseconds_per_token_{which}"] = round(1e6 * spent / tokens, 1)
    benchmark.extra_info["load_average"] = round(os.getloadavg()[0], 1)
