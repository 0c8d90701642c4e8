"""`serve --in-process`: the same server with the engine inside the API process, as a debugger needs it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess, byte_config

from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.features.in_process.async_inproc_client import AsyncInprocClient
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

FLAGS = ("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
Start = Callable[..., ServerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ServerProcess] = []

    def make(*flags: str, patch: str = "") -> ServerProcess:
        servers.append(ServerProcess(*FLAGS, "--in-process", *flags, patch=patch))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    more = ("--server-dev-mode", "--enable-prompt-tokens-details")  # for /reset_prefix_cache, and to see what it does
    server = ServerProcess(*FLAGS, "--in-process", *more)
    server.wait_until_ready()
    yield server
    server.close()


def post(url: str, **body: object) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json=body)


def test_the_same_tokens_as_with_an_engine_process(server: ServerProcess) -> None:
    prompts = ["ROMEO:", "To be, or", "What news", "All:", "O"]
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]

    def ask(job: tuple[str, dict]) -> str:
        return post(server.url, prompt=job[0], max_tokens=24, **job[1]).json()["choices"][0]["text"]

    jobs = [(prompt, kind) for prompt in prompts for kind in kinds]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, jobs))
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000, multiprocess=True) as llm:
        params = [SamplingParams(max_tokens=24, **kind) for _, kind in jobs]
        expected = [o.outputs[0].text for o in llm.generate([prompt for prompt, _ in jobs], params)]
    assert answers == expected


def test_it_is_one_process_and_answers_between_two_steps(server: ServerProcess) -> None:
    assert not psutil.Process(server.process.pid).children()
    body = {"prompt": "ROMEO:", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert httpx.get(server.url + "/health").status_code == 200
        running = httpx.get(server.url + "/metrics").text
        assert 'vllm:num_requests_running{engine="0",model_name="gpt2-tiny"} 1.0' in running
    free = (
        'vllm:kv_cache_usage_perc{engine="0",model_name="gpt2-tiny"} 0.0'  # it left in the middle: its blocks come back
    )
    wait_until(lambda: free in httpx.get(server.url + "/metrics").text, "the abandoned request still runs")


def test_prefix_cache_and_refusals(server: ServerProcess) -> None:
    def cached() -> int:
        usage = post(server.url, prompt="a piece of work is a man, " * 4, max_tokens=2).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 < cached()
    assert httpx.post(server.url + "/reset_prefix_cache").status_code == 200
    assert cached() == 0
    assert post(server.url, prompt="a", stop_token_ids=[-1]).status_code == 400
    refused = post(server.url, prompt="a", structured_outputs={"grammar": "root ::= nothing"})
    assert refused.status_code == 400 and httpx.get(server.url + "/health").status_code == 200


def test_the_trace_has_one_process_and_the_end_is_clean(start: Start, tmp_path: Path) -> None:
    server = start("--trace", str(tmp_path))
    assert post(server.url, prompt="ROMEO:", max_tokens=3).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.process.stdout is not None and "torch" in server.process.stdout.read().split()
    run = read_run(tmp_path)
    assert {event.proc for event in run.events} == {"APIServer"} and len({event.pid for event in run.events}) == 1
    [request] = {event.req for event in run.named("sched.queued")}
    assert len(run.named("sched.token")) == 3 and "http.request" in {e.name for e in run.of_request(request or "")}


DIES = """
from stage03_engine.core.model_runner import ModelRunner
run, calls = ModelRunner.execute_model, []
def execute_model(self, output):
    calls.append(1)
    if len(calls) == 5:
        raise RuntimeError("planted: secret words")
    return run(self, output)
ModelRunner.execute_model = execute_model
"""


def test_an_exception_in_a_step_reaches_every_client_and_ends_the_server(start: Start, tmp_path: Path) -> None:
    server = start("--trace", str(tmp_path), patch=DIES)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda i: post(server.url, prompt=f"{i}", max_tokens=300, ignore_eos=True), range(3)))
    assert {answer.status_code for answer in answers} == {503}
    assert httpx.get(server.url + "/health").status_code == 503
    assert server.wait() == 1
    assert any("planted" in line for line in server.lines)
    recorded = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert "engine.failed" in recorded and "engine.dead" in recorded and "secret words" not in recorded


def test_a_dead_core_is_never_touched_again() -> None:
    class Core:
        num_gpu_blocks, has_unfinished_requests, calls = 1, True, 0

        def step(self) -> None:
            self.calls += 1
            raise KeyError("planted")

    async def drive() -> tuple[int, set[str]]:
        core: Any = Core()
        client = AsyncInprocClient(byte_config(), lambda _: core)
        await client.start()
        said = set()
        for call in (client.get_output_async, client.get_output_async, partial(client.call, "reset_prefix_cache")):
            with pytest.raises(EngineDeadError) as caught:
                await call()
            said.add(str(caught.value))
        return core.calls, said

    assert asyncio.run(drive()) == (1, {"The engine stopped: KeyError: 'planted'"})


def test_a_breakpoint_in_the_scheduler_is_at_the_terminal() -> None:
    """pdb reads our standard input, in the main thread, and the request goes on after `c`."""
    code = """if True:
        import sys
        from stage03_engine.core.scheduler import Scheduler
        schedule = Scheduler.schedule
        def stopping(self):
            Scheduler.schedule = schedule
            breakpoint()
            return schedule(self)
        Scheduler.schedule = stopping
        from stage02_server.__main__ import main
        sys.exit(main(["serve", *sys.argv[1:]]))
    """
    command = [sys.executable, "-c", code, *FLAGS, "--in-process"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stderr is not None and process.stdin is not None and process.stdout is not None
            url = next(line for line in process.stderr if " on http://" in line).split(" on ")[-1].strip()
            process.stdin.write("p 'waiting', len(self.waiting)\nc\n")
            process.stdin.flush()
            assert post(url, prompt="ROMEO:", max_tokens=3).json()["usage"]["completion_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            assert "('waiting', 1)" in process.stdout.read()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_in_process_is_about_the_real_engine() -> None:
    server = ServerProcess(*FLAGS, "--in-process", "--engine", "echo")
    try:
        assert server.wait() == 2 and "in_process" in server.lines[0] and len(server.lines) == 1
    finally:
        server.close()
