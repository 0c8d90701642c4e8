"""Workers as actors of the real Ray, which takes seconds to start: `pytest -m long`, where it is installed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import wait_until

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError, EngineDeadError
from stage03_engine.frontend.features.in_process.sync_mp_client import SyncMPClient
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.long
RAY: dict[str, Any] = {"distributed_executor_backend": "ray", "kv_cache_memory_bytes": 50_000_000}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


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
