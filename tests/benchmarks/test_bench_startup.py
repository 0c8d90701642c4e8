"""Start-up, size and death of the processes, as a user would measure them from outside (`make bench`)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from server_under_test import ServerProcess


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a command and its children."""
    before = psutil.Process().cpu_times()
    subprocess.run(command, check=True, capture_output=True)
    after = psutil.Process().cpu_times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help(benchmark: BenchmarkFixture) -> None:
    """`stages --help`: to be under 0.3 s of CPU time, and beside it a Python that does nothing."""
    command = [sys.executable, "-m", "stage01_cli", "--help"]
    benchmark.pedantic(lambda: subprocess.run(command, check=True, capture_output=True), rounds=5)
    benchmark.extra_info["cpu_seconds"] = round(statistics.median(cpu_seconds(command) for _ in range(5)), 3)
    nothing = [sys.executable, "-c", "pass"]
    benchmark.extra_info["cpu_seconds_of_empty_python"] = round(
        statistics.median(cpu_seconds(nothing) for _ in range(5)), 3
    )


@pytest.mark.parametrize("engine", ["echo", "core"])
def test_serve_to_health(benchmark: BenchmarkFixture, engine: str) -> None:
    """From the command to /health 200 (to be within 5 s on two cores), and the memory of the two processes then."""
    memory: dict[str, int] = {}

    def start() -> None:
        server = ServerProcess("gpt2-tiny", "--engine", engine, "--host", "127.0.0.1", "--port", "0")
        try:
            url = server.wait_until_ready()
            assert httpx.get(url + "/health").status_code == 200
            stop.append(time.perf_counter())
            process = psutil.Process(server.process.pid)
            memory["api_process_mb"] = process.memory_info().rss >> 20
            for child in process.children():
                memory["engine_process_mb"] = child.memory_info().rss >> 20
        finally:
            server.close()

    stop: list[float] = []
    times = []
    for _ in range(5):
        began = time.perf_counter()
        start()
        times.append(stop[-1] - began)
    benchmark.pedantic(start, rounds=1)
    benchmark.extra_info["seconds_to_health"] = round(statistics.median(times), 2)
    benchmark.extra_info.update(memory)


def test_answers_after_the_engine_is_killed(benchmark: BenchmarkFixture) -> None:
    """From the kill to the last of 16 streaming clients' answers: to be within 2 s."""
    times = []

    def kill() -> None:
        server = ServerProcess("gpt2-tiny", "--host", "127.0.0.1", "--port", "0")
        try:
            url = server.wait_until_ready()
            [engine] = psutil.Process(server.process.pid).children()
            all_stream = threading.Barrier(17)

            def ask() -> float:
                body = {"prompt": "ROMEO:", "max_tokens": 400, "ignore_eos": True, "stream": True}
                with httpx.stream("POST", url + "/v1/completions", json=body) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    all_stream.wait()
                    assert any('"error"' in line for line in lines)
                return time.perf_counter()

            with ThreadPoolExecutor(16) as pool:
                answers = [pool.submit(ask) for _ in range(16)]
                all_stream.wait()
                killed = time.perf_counter()
                engine.kill()
                times.append(max(answer.result() for answer in answers) - killed)
        finally:
            server.close()

    benchmark.pedantic(kill, rounds=5)
    benchmark.extra_info["seconds_to_the_last_answer"] = round(statistics.median(times), 3)
