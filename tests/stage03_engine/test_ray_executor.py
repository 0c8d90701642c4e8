"""Workers as actors of the real Ray, which takes seconds to start: `pytest -m long`, where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import wait_until

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.distributed.ray_executor import SHUT_IN, TOKENS
from stage03_engine.errors import ConfigError, EngineDeadError
from stage03_engine.frontend.features.in_process.sync_mp_client import SyncMPClient
from stage03_engine.llm import LLM
from stage03_engine.mixins import is_there
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

OURS = SHUT_IN | {TOKENS[0]: "0" * 64}  # one for all tests: Ray reads it once
if is_there("ray"):
    os.environ.update(OURS)  # before it is imported
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.long
RAY: dict[str, Any] = {"distributed_executor_backend": "ray", "kv_cache_memory_bytes": 50_000_000}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(autouse=True)
def shut_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)


def actors(parent: int | None = None) -> list[psutil.Process]:
    found = psutil.Process(parent).children(recursive=True)
    return [process for process in found if "ray::Actor" in " ".join(process.cmdline())]  # Ray names it


@pytest.mark.parametrize("count", [1, 2])
def test_the_same_tokens_and_a_lane_per_worker(count: int, tmp_path: Any) -> None:
    prompts = ["To be, or", "ROMEO:", "O"]
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    with LLM("gpt2-tiny", tensor_parallel_size=count, trace=str(tmp_path), **RAY) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == expected
    run = read_run(tmp_path)
    assert {event.proc for event in run.events} == {"LLM", "Worker_TP0", f"Worker_TP{count - 1}"}
    sent = {event.ref for event in run.named("executor.step_sent")}
    assert {event.cause for event in run.named("worker.step_received")} == sent


def test_a_killed_actor_ends_the_engine_with_its_name() -> None:
    folders = set(Path(tempfile.gettempdir()).glob("stages-ray-*"))
    client = SyncMPClient(EngineArgs.from_kwargs(model="gpt2-tiny", **RAY))
    pid = client._process.pid
    children = psutil.Process(pid).children(recursive=True)
    try:
        [actor] = actors(pid)
        actor.kill()
        with pytest.raises(EngineDeadError, match="Worker_TP0 ended unexpectedly"):
            while True:
                client.get_output()
    finally:
        client.shutdown()
    psutil.wait_procs(children, timeout=30)
    wait_until(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children), "Ray stays")
    assert set(Path(tempfile.gettempdir()).glob("stages-ray-*")) <= folders, "where the workers met stays"


def test_a_cluster_of_ones_own_is_shut_in() -> None:
    """No port of it is open to other machines, and whoever has no token, or another one, is not heard."""
    with LLM("gpt2-tiny", **RAY):
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        open_ports = [each for process in family for each in process.net_connections("tcp") if each.status == "LISTEN"]
        assert len(open_ports) > 5
        assert {each.laddr.ip.removeprefix("::ffff:") for each in open_ports} <= {"127.0.0.1", "::1"}, open_ports
        address = ray.get_runtime_context().gcs_address
        for wrong in ({"RAY_AUTH_TOKEN": "f" * 64}, {"RAY_AUTH_MODE": "disabled"}):
            ask = f"import ray; ray.init(address={address!r}); print('came in')"
            asked = subprocess.run([sys.executable, "-c", ask], env=os.environ | wrong, capture_output=True, text=True)
            assert asked.returncode and "came in" not in asked.stdout and "uthentication" in asked.stderr, asked.stderr
        right = subprocess.run([sys.executable, "-c", ask], env=os.environ, capture_output=True, text=True)
        assert right.returncode == 0 and "came in" in right.stdout, right.stderr


def test_a_cluster_that_is_too_small_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    try:
        with pytest.raises(
            ConfigError, match="too small: 2 workers on one node need 2 CPU, and the largest node has 1 CPU"
        ):
            LLM("gpt2-tiny", tensor_parallel_size=2, **RAY)
        assert ray.is_initialized(), "a cluster that was there before stays"
    finally:
        ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="the Ray cluster at RAY_ADDRESS=127.0.0.1:1 cannot be joined"):
        LLM("gpt2-tiny", **RAY)
