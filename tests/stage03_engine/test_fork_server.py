"""`VLLM_WORKER_MULTIPROC_METHOD=forkserver`: workers from one process that has imported torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_start
import psutil
import pytest
from patience import wait_until

from stage03_engine.core.features.distributed.fork_server import METHOD, ForkServer
from stage03_engine.errors import EngineDeadError, StagesError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run, trace

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=6)


def generated(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(["ROMEO:", "K"], PARAMS)]


def servers_of(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if "fork_server" in " ".join(each.cmdline())]


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tests' own fork server stays out of it."""
    monkeypatch.setenv(METHOD, "forkserver")
    with fork_start.plainly():
        yield


def test_workers_are_forked_and_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with LLM("gpt2-tiny", **SMALL) as llm:
        expected = generated(llm)
    with LLM("gpt2-tiny", tensor_parallel_size=2, trace=str(tmp_path), **SMALL) as llm:
        assert generated(llm) == expected
        (server, *_) = servers_of(psutil.Process())
        workers = server.children()
        spawned = [event.args["pid"] for event in read_run(tmp_path).named("worker.spawned")] or [
            w.pid for w in workers
        ]
        assert len(workers) == 2 and {each.pid for each in workers} == set(spawned)
        assert all(os.getsid(each.pid) == os.getsid(0) for each in workers)
    trace.close()
    assert not psutil.pid_exists(server.pid) and not any(psutil.pid_exists(each.pid) for each in workers)
    lanes = {event.proc for event in read_run(tmp_path).named("worker.ready")}
    assert lanes == {"Worker_TP0", "Worker_TP1"}


@pytest.mark.slow
def test_a_worker_that_is_killed_is_known_with_its_code() -> None:
    with LLM("gpt2-tiny", tensor_parallel_size=2, **SMALL) as llm:
        [server] = [each for each in servers_of(psutil.Process()) if each.children()]
        victim = server.children()[1]
        victim.kill()
        with pytest.raises((StagesError, EngineDeadError), match="ended unexpectedly with exit code -9"):
            generated(llm)
    assert not psutil.pid_exists(server.pid)


@pytest.mark.slow
def test_an_error_of_a_worker_is_its_own_line() -> None:
    with pytest.raises(StagesError, match="Worker_TP0: --worker-cls json:JSONDecoder: not a subclass"):
        LLM("gpt2-tiny", distributed_executor_backend="mp", worker_cls="json:JSONDecoder", **SMALL)
    assert not servers_of(psutil.Process())


OWNER = """
import signal
from stage03_engine.llm import LLM
llm = LLM("gpt2-tiny", kv_cache_memory_bytes=20_000_000, device="cpu", tensor_parallel_size=2)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.slow
def test_nothing_stays_behind_after_kill_9(stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) == 3
        if stopped:
            family[-1].send_signal(signal.SIGSTOP)
        owner.kill()
    wait_until(lambda: not any(each.is_running() for each in family), "a process stays")


def test_a_fork_server_that_is_gone_is_one_line() -> None:
    server = ForkServer(os.environ)
    server._process.kill()
    server._process.wait()
    try:
        with pytest.raises(StagesError, match="the fork server of the workers has ended"):
            server.start("pipe:0:/nowhere", 0, "Worker_TP0", ())
    finally:
        server.close()


@pytest.mark.slow
def test_a_fork_server_that_was_stopped_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who ends the workers, whose ends it does not report, nor who starts one."""
    llm = LLM("gpt2-tiny", tensor_parallel_size=2, **SMALL)
    [server] = [each for each in servers_of(psutil.Process()) if each.children()]
    server.suspend()
    llm.shutdown()
    assert not server.is_running()
    monkeypatch.setattr("stage03_engine.core.features.distributed.fork_server.START_SECONDS", 0.5)
    idle = ForkServer(os.environ)
    try:
        psutil.Process(idle._process.pid).suspend()
        with pytest.raises(StagesError, match="has ended, or says nothing"):
            idle.start("pipe:0:/nowhere", 0, "Worker_TP0", ())
    finally:
        idle.close()
