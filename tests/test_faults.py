"""What breaks, and what becomes of everybody else: killed processes, failed starts, clients that leave.

The long form kills the engine 50 times: `pytest -m long tests/test_faults.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stage03_engine.errors import StagesError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stagetrace import read_run

FLAGS = ("--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
LONG = {"prompt": "ROMEO:", "max_tokens": 400, "ignore_eos": True}
Start = Callable[..., ServerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ServerProcess] = []

    def make(*flags: str, model: str = "gpt2-tiny") -> ServerProcess:
        servers.append(ServerProcess(model, *FLAGS, *flags))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


class Processes:
    """The processes of a running server and what they hold outside of themselves."""

    def __init__(self, server: ServerProcess) -> None:
        self.api = psutil.Process(server.process.pid)
        self.all = [self.api, *self.api.children(recursive=True)]
        [self.engine] = [p for p in self.all if " ".join(p.cmdline()).startswith("stages::EngineCore")]
        self.sockets = Path(self.engine.cmdline()[0].split()[-2].removeprefix("ipc://")).parent
        assert self.sockets.is_dir()
        for process in self.all:
            maps = Path(f"/proc/{process.pid}/maps")
            assert not maps.exists() or "/dev/shm/" not in maps.read_text(), "shared memory could be left behind"

    def check_gone(self) -> None:
        """No process, no socket file. (Whose parent was killed is reaped by the system's first process, in its own time.)"""
        _, alive = psutil.wait_procs([p for p in self.all if p is not self.api], timeout=PATIENCE)
        assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not self.sockets.exists()


async def _one_answer(client: httpx.AsyncClient, stream: bool, on_chunk: Callable[[], None]) -> None:
    """Returns with the first answer that is an error of the server: a 503, an error event, or a closed port."""
    while True:
        try:
            async with client.stream("POST", "/v1/completions", json=LONG | {"stream": stream}) as response:
                lines = [line async for line in _counted(response, on_chunk)]
        except httpx.ConnectError:
            return
        if response.status_code != 200:
            assert response.status_code == 503 and json.loads(lines[0])["error"]["type"] == "ServiceUnavailableError"
            return
        if any('"error"' in line for line in lines):
            assert lines[-1] == "data: [DONE]"
            return


async def _counted(response: httpx.Response, on_chunk: Callable[[], None]) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        on_chunk()
        if line:
            yield line


async def _kill_engine_under_load(url: str, engine: psutil.Process, after_chunks: int, num_clients: int) -> None:
    """Returns when every client has been answered."""
    count = 0

    def on_chunk() -> None:
        nonlocal count
        count += 1
        if count == after_chunks:
            engine.kill()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        await asyncio.gather(*(_one_answer(client, i % 4 != 3, on_chunk) for i in range(num_clients)))


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_every_client_is_answered_when_the_engine_is_killed(start: Start, times: int) -> None:
    rng = random.Random(times)
    for _ in range(times):
        server = start()
        url = server.wait_until_ready()
        processes = Processes(server)
        after = rng.choice([1, rng.randint(2, 40), rng.randint(40, 800)])
        asyncio.run(_kill_engine_under_load(url, processes.engine, after, rng.randint(1, 16)))
        assert not processes.engine.is_running(), "the API process left a zombie"
        assert server.wait() == 1
        processes.check_gone()
        assert not any("Traceback" in line for line in server.lines)


def test_an_engine_killed_while_it_loads_is_one_line(start: Start) -> None:
    server = start()
    server.wait_for("HTTP is up")
    [engine] = psutil.Process(server.process.pid).children()
    engine.kill()
    assert server.wait() == 1
    errors = [line for line in server.lines if line.startswith("stages: error: ")]
    assert len(errors) == 1 and "-9" in errors[0]
    assert not any("Traceback" in line for line in server.lines)


def test_a_stopped_engine_is_stalled_until_it_continues(start: Start) -> None:
    server = start("--engine-stall-seconds", "0.3")
    url = server.wait_until_ready()
    engine = Processes(server).engine

    def state() -> str:
        answer = httpx.get(f"{url}/health", timeout=PATIENCE)
        return "ready" if answer.status_code == 200 else answer.json()["state"]

    wait_until(lambda: state() == "ready", "it stays stalled")
    engine.suspend()
    try:
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "ROMEO:", "max_tokens": 4}
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=PATIENCE)
            wait_until(lambda: state() == "stalled", "a stopped engine counts as ready")
            engine.resume()
            assert answer.result().status_code == 200
    finally:
        engine.resume()
    wait_until(lambda: state() == "ready", "an engine that works counts as stalled")


def test_killing_the_api_process_ends_everything_else(start: Start) -> None:
    """A grammar makes a process of its own, below the engine's."""
    server = start()
    url = server.wait_until_ready()
    body = {"prompt": "x", "max_tokens": 4, "guided_regex": "[a-z]+"}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    processes = Processes(server)
    assert len(processes.all) > 2
    server.process.kill()
    processes.check_gone()


@pytest.mark.slow
def test_the_second_sigterm_ends_open_streams_with_an_error(start: Start) -> None:
    server = start("--shutdown-timeout", "1000")
    url = server.wait_until_ready()
    processes = Processes(server)
    ends: list[list[str]] = []

    def read() -> None:
        body = LONG | {"stream": True, "n": 16, "temperature": 1}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            begun.wait(PATIENCE)
            ends.append(list(lines)[-2:])

    begun = threading.Barrier(4)
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    begun.wait(PATIENCE)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("SIGTERM: finishing 3 requests")
    server.process.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join(PATIENCE)
    assert len(ends) == 3
    for error, done in ends:
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503 and done == "data: [DONE]"
    assert server.wait() == 0
    processes.check_gone()


def _damaged(how: str, folder: Path) -> Path:
    """A copy of gpt2-tiny that cannot be loaded."""
    shutil.copytree(BUNDLED_FOLDER / "gpt2-tiny", folder, copy_function=shutil.copy)
    weights = folder / "model.safetensors"
    if how == "cut off":
        os.truncate(weights, weights.stat().st_size // 2)
    elif how == "no weights":
        weights.write_bytes(b"")
    elif how == "no memory has that size":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"n_embd": 2**30}))
    elif how == "other shape":
        config = json.loads((folder / "config.json").read_text())
        config["n_embd"] *= 2
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(start: Start, tmp_path: Path) -> None:
    """Not even by an exception of torch's own."""
    server = start(model=str(_damaged("no memory has that size", tmp_path / "model")))
    assert server.wait() == 1
    _one_line(server)


@pytest.mark.parametrize("how", ["cut off", "no weights", "other shape"])
def test_the_engine_refuses_a_model_that_cannot_be_loaded(tmp_path: Path, how: str) -> None:
    """What a server would then print is this error."""
    with pytest.raises(StagesError) as refused:
        LLM(str(_damaged(how, tmp_path / "model")), kv_cache_memory_bytes=50_000_000)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "setting", [{"num_gpu_blocks_override": 10**12}, {"kv_cache_memory_bytes": 2 * psutil.virtual_memory().total}]
)
def test_the_engine_refuses_a_cache_larger_than_memory(setting: dict[str, int]) -> None:
    with pytest.raises(StagesError, match="memory"):
        LLM("gpt2-tiny", **setting)


def _one_line(server: ServerProcess) -> str:
    """What a failed start says, beside the log."""
    lines = [line for line in server.lines if not re.match(r"\(\w+ pid=\d+\) (INFO|WARNING) ", line)]
    assert len(lines) == 1 and lines[0].startswith("stages: error: "), lines
    return lines[0]


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_blocks_within_a_step(start: Start, tmp_path: Path) -> None:
    server = start("--trace", str(tmp_path))
    url = server.wait_until_ready()
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as response:
        next(response.iter_lines())
    server.wait_for("POST /v1/completions")  # the access log's line at the end of the answer
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    run = read_run(tmp_path)
    [finished] = run.named("sched.finished")
    [heard] = [event for event in run.named("zmq.request_received") if event.args["type"] == "ABORT"]
    assert finished.args["reason"] == "abort" and finished.args["freed_blocks"] > 0
    steps = [e for e in run.named("engine.step") if e.ph == "B" and heard.ts < e.ts < finished.ts]
    assert len(steps) <= 1
