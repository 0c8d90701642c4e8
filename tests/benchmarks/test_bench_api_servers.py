"""One API server and two (`make bench`): 16 streams on the echo engine, where HTTP and text are all the work.

The clients are another process; on two cores they take a share of what a second server could use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_sixteen_streams(benchmark: BenchmarkFixture, server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, CLIENTS, port, "/v1/completions", str(STREAMS), str(TOKENS), "gpt2-tiny"]
    reports: list[dict[str, Any]] = []

    def ask() -> None:
        done = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
        reports.append(json.loads(done.stdout))

    benchmark.pedantic(ask, rounds=5, warmup_rounds=1)
    benchmark.extra_info["tokens_per_second"] = round(STREAMS * TOKENS / min(each["seconds"] for each in reports))
    benchmark.extra_info["milliseconds_to_first_chunk"] = round(1e3 * min(each["ttft"] for each in reports), 1)
    benchmark.extra_info["load_average"] = round(os.getloadavg()[0], 1)
