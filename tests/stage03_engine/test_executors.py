"""Workers in processes of their own: the same tokens as in the engine process, and nothing hangs or stays behind when one ends."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from patience import PATIENCE, wait_until
from safetensors.torch import load_file, save_file
from server_under_test import ServerProcess

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed import external_launcher, spawned_workers
from stage03_engine.core.features.distributed.external_launcher import ExecutorWithExternalLauncher
from stage03_engine.core.features.distributed.multiproc_executor import MultiprocExecutor
from stage03_engine.core.features.distributed.rank_worker import RANK_CONFIG
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.several_workers import (
    check_devices,
    lane_of,
    share_of_memory,
    threads_each,
)
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.worker import Worker
from stage03_engine.errors import ConfigError, EngineDeadError, EngineStartError, StagesError
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.data_parallel.engine import numbered
from stage03_engine.frontend.features.in_process.sync_mp_client import SyncMPClient
from stage03_engine.llm import LLM
from stage03_engine.mixins import is_there
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.check.invariants import check

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 50_000_000}
TIGHT: dict[str, Any] = {
    "max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 8,
}  # fmt: skip
MP = {"distributed_executor_backend": "mp"}
needs_slices = pytest.mark.skipif(not is_there(RANK_CONFIG.partition(":")[0]), reason="the model cannot be sliced here")


def workload(count: int = 20) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, more than the cache holds, in chunks."""
    rng = random.Random(15)
    stems = [[rng.randrange(1, 2048) for _ in range(40)] for _ in range(4)]
    prompts = [
        stems[i % 4][: rng.randrange(41)] + [rng.randrange(1, 2048) for _ in range(rng.randrange(1, 16))]
        for i in range(count)
    ]
    return prompts, [SamplingParams(temperature=0, max_tokens=rng.randrange(4, 24), ignore_eos=True) for _ in prompts]


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def workers_of(parent: int | None = None) -> list[psutil.Process]:
    found = psutil.Process(parent).children(recursive=True)
    return [
        process for process in found if "stages::Worker" in _command(process) or "worker_process" in _command(process)
    ]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def folder_of(llm: LLM) -> Path:
    return executor_of(llm).workers._folder.path


def executor_of(llm: LLM) -> MultiprocExecutor:
    return llm.engine_core._core.executor  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM("gpt2-tiny", **TIGHT) as llm:
        found = tokens(llm, *workload())
        stats = llm.engine_core._core.scheduler.make_stats()  # type: ignore[attr-defined]
    assert stats.num_preemptions and stats.prefix_cache_hits, "void: nothing was preempted, or nothing was found"
    return found


@pytest.fixture(scope="module")
def recorded(expected: list[list[int]], recording: Path) -> list[list[int]]:
    """The same with a worker in a process of its own, recorded."""
    with LLM("gpt2-tiny", trace=str(recording), trace_layers=True, **TIGHT, **MP) as llm:
        [worker], folder = workers_of(), folder_of(llm)
        assert folder.stat().st_mode & 0o777 == 0o700, "the folder of the sockets is private"
        found = tokens(llm, *workload())
    assert not worker.is_running() and not folder.exists()
    return found


def test_the_same_tokens_as_in_the_engine_process(expected: list[list[int]], recorded: list[list[int]]) -> None:
    assert recorded == expected


@needs_slices
def test_two_workers_give_the_same_tokens(expected: list[list[int]]) -> None:
    """Those of pipeline stages are in test_pipeline_processes.py."""
    with LLM("gpt2-tiny", tensor_parallel_size=2, **TIGHT) as llm:
        assert len(workers_of()) == 2, "mp is the default for several"
        assert tokens(llm, *workload()) == expected


def test_a_worker_is_a_lane_of_the_trace_whose_messages_are_linked(recorded: list[list[int]], recording: Path) -> None:
    run = read_run(recording)
    lanes = {event.proc for event in run.events}
    assert lanes == {"LLM", "Worker_TP0"}
    of_worker = {event.name for event in run.events if event.proc == "Worker_TP0"}
    assert of_worker >= {
        "worker.hello",
        "worker.ready",
        "weights.loaded",
        "model.forward",
        "model.mlp",
        "worker.stopped",
    }
    for received, sent in (
        ("worker.step_received", "executor.step_sent"), ("executor.output_received", "worker.output_sent"),
        ("worker.init_sent", "worker.hello"), ("worker.ready", "worker.init_sent"),
    ):  # fmt: skip
        causes = {event.ref: event for event in run.named(sent)}
        events = run.named(received)
        assert events and len(events) == len(causes)
        assert all(causes[event.cause].step == event.step for event in events if event.cause is not None)
        assert all(event.cause is not None for event in events)
    # This process has recorded before, and the numbers of its events go on: they begin late.
    assert [str(finding) for finding in check(recording).findings if "event 1 to " not in finding.text] == []
    assert [result.difference for result in replay(recording)] == [None]


MODULE = """
import torch
from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor

class EvenOnly(LogitsProcessor):
    def is_argmax_invariant(self):
        return False
    def apply(self, logits, rows):
        logits = logits.clone()
        logits[:, 1::2] = -torch.inf
        return logits
"""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FEATURES: dict[str, dict[str, Any]] = {
    "drafts and swapping": {"speculative_config": NGRAM, "preemption_mode": "swap", "swap_space": 0.01, **TIGHT},
    "early decisions, logits processors": {
        "async_scheduling": True,
        "logits_processors": ["own_rules:EvenOnly"],
        **TIGHT,
    },
}
ASKED = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, top_p=0.9, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=4, max_tokens=12, min_p=0.01, repetition_penalty=1.3, logit_bias={40: 2.0}, bad_words=["the"]),
    SamplingParams(seed=5, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-z ]{4,30}")),
    SamplingParams(seed=None, max_tokens=12),
]  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_what_requests_ask_of_features(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rules.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    prompts = ["To be, or not to be, or not to be, or not", "ROMEO:", "What news", "O", "First Citizen:"] * 2
    found = []
    for backend in ("uni", "mp"):
        with LLM("gpt2-tiny", distributed_executor_backend=backend, **FEATURES[name]) as llm:
            outputs = llm.generate(prompts, ASKED * 2)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs])
    assert found[0] == found[1]


def test_vectors() -> None:
    found = []
    for backend in ("uni", "mp"):
        with LLM("gpt2-tiny", runner="pooling", distributed_executor_backend=backend, **SMALL) as llm:
            found.append([output.result for output in llm.encode(["To be, or", "ROMEO:"])])
    assert found[0] == found[1] and len(found[1]) == 2


def test_steps_in_flight_are_answered_in_order_and_signals_do_not_reach_the_worker() -> None:
    with LLM("gpt2-tiny", **MP, **SMALL) as llm:
        executor = executor_of(llm)
        for step in (1, 2, 3):
            executor.begin_step(SchedulerOutput(step, [], {}, {}, [], []))
        assert [executor.finish_step().sampled_token_ids for _ in range(3)] == [{}] * 3
        assert not executor._in_flight
        [worker] = workers_of()
        worker.terminate()
        assert len(tokens(llm, ["O"], SamplingParams(max_tokens=3, ignore_eos=True))[0]) == 3
        assert worker.is_running()


# Strangers


@needs_slices
@pytest.mark.skipif(sys.platform != "linux", reason="the ports stay open elsewhere")
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=["slices", "stages", "both"])
@pytest.mark.slow(keep="both")
def test_nobody_else_gets_into_a_worker(sizes: tuple[int, int]) -> None:
    """gloo keeps each connection for good, even one that is closed again, and aborts when it runs out of descriptors."""
    tensor, pipeline = sizes
    with LLM("gpt2-tiny", **SMALL, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline) as llm:
        before = tokens(llm, ["To be, or"], SamplingParams(temperature=0, max_tokens=4))
        doors, num_files = [], {}
        for worker in workers_of():
            doors += [each.laddr for each in worker.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            num_files[worker] = worker.num_fds()
        assert doors, "void: no worker listens"
        for door in doors:
            with pytest.raises(OSError), socket.create_connection((door.ip, door.port), timeout=0.2):
                pass
        assert {worker: worker.num_fds() for worker in num_files} == num_files
        assert tokens(llm, ["To be, or"], SamplingParams(temperature=0, max_tokens=4)) == before


# Deaths


def config(**settings: Any) -> VllmConfig:
    return EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL, **MP, **settings)


def test_a_killed_worker_ends_the_idle_engine_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    """In a step: `test_of_several_workers_the_one_that_is_killed_is_named`."""
    client = SyncMPClient(config())
    try:
        [worker] = workers_of(client._process.pid)
        worker.kill()
        with pytest.raises(EngineDeadError, match=r"stopped: Worker_TP0 ended unexpectedly with exit code -9 \(killed"):
            while True:
                client.get_output()
        wait_until(lambda: not client._process.alive, "the engine lives on")
    finally:
        client.shutdown()
    assert "Traceback" not in capfd.readouterr().err


@needs_slices
@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_of_several_workers_the_one_that_is_killed_is_named(
    settings: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """And not those that wait for it, who have nothing to add."""
    with LLM("gpt2-tiny", **SMALL, **settings) as llm:
        tokens(llm, ["O"], SamplingParams(max_tokens=2))
        name, victim = next((lane, each) for each in workers_of() if (lane := _command(each).split()[0])[-1] == "0")
        llm.add_request(
            llm.input_processor.process_inputs("r", "ROMEO:", SamplingParams(max_tokens=400, ignore_eos=True))
        )
        llm.step()
        victim.kill()
        with pytest.raises(
            EngineDeadError, match=f"{name.removeprefix('stages::')} ended unexpectedly with exit code -9"
        ):
            while True:
                llm.step()
    assert "Traceback" not in capfd.readouterr().err


DIES = """
import os, signal
from stage03_engine.core.worker import Worker

class Dies(Worker):
    def __getattribute__(self, name):
        if name == os.environ["DIES_IN"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)
"""
AT_START = sorted({name for name in vars(Worker) if not name.startswith("_")} - {"execute_model", "shutdown"})


@pytest.mark.parametrize("method", AT_START)
def test_a_worker_killed_while_it_starts_is_one_line(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thing that is asked of a worker before its first step, and it dies of that one."""
    (tmp_path / "dying_worker.py").write_text(DIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DIES_IN", method)
    settings: dict[str, Any] = {"worker_cls": "dying_worker:Dies", "max_model_len": 96}
    process = EngineProcess(EngineArgs.from_kwargs(model="gpt2-tiny", **settings, **MP))
    try:
        with pytest.raises(EngineStartError, match="Worker_TP0 ended unexpectedly with exit code -9"):
            process.shake_hands()
    finally:
        process.shutdown()


def test_the_next_step_after_a_death_raises_in_this_process() -> None:
    with LLM("gpt2-tiny", **MP, **SMALL) as llm:
        tokens(llm, ["O"], SamplingParams(max_tokens=2))
        [worker], folder = workers_of(), folder_of(llm)
        worker.kill()
        with pytest.raises(EngineDeadError, match="Worker_TP0 ended unexpectedly"):
            tokens(llm, ["O"], SamplingParams(max_tokens=200))
        said: list[str] = []
        executor_of(llm).on_failure(said.append)
        assert said and "Worker_TP0" in said[0], "who asks later is told too"
    assert not folder.exists() and not workers_of()


def test_an_engine_that_cannot_start_ends_its_workers() -> None:
    """The number of blocks is decided after the workers have started, and may be impossible."""
    with pytest.raises(ConfigError, match="the KV cache has room for") as caught:
        LLM("gpt2-tiny", kv_cache_memory_bytes=100_000, **MP)
    assert not workers_of(), caught  # whose traceback still holds the executor


@pytest.mark.parametrize("multiprocess", [pytest.param(False, marks=pytest.mark.long), True])
def test_killing_the_parent_ends_the_workers(multiprocess: bool) -> None:
    """On Linux even those that are stopped, and so cannot see it."""
    script = f"""
        from stage03_engine.llm import LLM
        from stage03_engine.sampling_params import SamplingParams
        if __name__ == "__main__":
            llm = LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000, distributed_executor_backend="mp", multiprocess={multiprocess})
            print("ready", flush=True)
            while True:
                llm.generate(["ROMEO:"] * 16, SamplingParams(max_tokens=None, ignore_eos=True))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    [worker] = workers_of(parent.pid)
    folder = Path(next(word for word in worker.cmdline()[0].split() if word.startswith("pipe:")).split(":", 2)[2])
    assert folder.exists()
    for child in children if sys.platform == "linux" else []:
        child.suspend()
    parent.kill()
    parent.communicate()
    psutil.wait_procs(children, timeout=PATIENCE)
    wait_until(
        lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children), "a process stays"
    )
    wait_until(lambda: not folder.exists(), "the private folder stays")


@pytest.mark.slow
def test_a_server_whose_worker_is_killed_answers_and_ends() -> None:
    flags = ("--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
    server = ServerProcess("gpt2-tiny", *flags, "--distributed-executor-backend", "mp")
    try:
        url = server.wait_until_ready()
        body = {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        [worker] = workers_of(server.process.pid)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"max_tokens": 400, "stream": True}, timeout=PATIENCE
        ) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            worker.kill()
            *_, error, done = lines
        assert "Worker_TP0 ended unexpectedly" in error or "error" in error
        assert done == "data: [DONE]"
        assert server.wait() == 1
        assert not any("Traceback" in line for line in server.lines), server.lines
        assert any("Worker_TP0 ended unexpectedly with exit code -9" in line for line in server.lines), server.lines
    finally:
        server.close()


# Errors


def damaged(folder: Path) -> str:
    shutil.copytree(BUNDLED_FOLDER / "gpt2-tiny", folder, copy_function=shutil.copy)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors")
    return str(folder)


def test_an_error_of_a_worker_arrives_as_what_it_is(tmp_path: Path) -> None:
    model = damaged(tmp_path / "model")
    with pytest.raises(StagesError) as alone:
        LLM(model, **SMALL)
    with pytest.raises(type(alone.value)) as caught:
        LLM(model, **SMALL, **MP)
    assert str(caught.value) == f"Worker_TP0: {alone.value}"
    wait_until(lambda: not workers_of(), "a worker stays")


def test_an_error_in_a_step_names_the_worker() -> None:
    with LLM("gpt2-tiny", **MP, **SMALL) as llm, pytest.raises(Exception, match="Worker_TP0: .*nobody") as caught:
        executor_of(llm).execute_model(SchedulerOutput(1, [], {"nobody": [1]}, {"nobody": 1}, [], []))
    assert type(caught.value) in (RuntimeError, ValueError)


def test_a_worker_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silent.py").write_text("import sys; sys.stdin.read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(spawned_workers, "MODULE", "silent")
    with pytest.raises(StagesError, match=r"^Worker_TP0 did not come within 1 s \(--distributed-timeout-seconds\)$"):
        LLM("gpt2-tiny", distributed_timeout_seconds=1, **MP, **SMALL)


def test_fewer_gpus_than_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = EngineArgs.from_kwargs(model="gpt2-tiny", device="cuda", **MP)
    check_devices(settings, 1)
    with pytest.raises(ConfigError, match="is 2: each worker needs a GPU, and torch finds 1"):
        check_devices(settings, 2)


def test_workers_share_the_cores_and_the_memory_of_a_cpu() -> None:
    settings = config(num_threads=5)
    assert [threads_each(settings, n) for n in (1, 2, 8)] == [5, 2, 1]
    assert share_of_memory(settings, 10 << 30, 1) == 10 << 30
    assert share_of_memory(settings, 10 << 30, 2) == 2 << 30 and share_of_memory(settings, 1 << 30, 4) == 1 << 28


def test_lanes_of_several_engines_have_their_number() -> None:
    """Whatever the process is called in the trace."""
    one, several = config(), config(data_parallel_size=2)
    assert lane_of(one, Ranks()) == lane_of(numbered(one, 0), Ranks()) == "Worker_TP0"
    assert [lane_of(numbered(several, engine), Ranks(1, 1, 2)) for engine in (0, 1)] == [
        "Worker_DP0_PP1_TP0",
        "Worker_DP1_PP1_TP0",
    ]
    assert numbered(several, 1).hash() == several.hash(), "the name of a process changes no work"


@pytest.mark.skipif(is_there("ray"), reason="Ray is installed")
def test_without_ray() -> None:
    with pytest.raises(ConfigError, match="needs Ray, which is not installed"):
        LLM("gpt2-tiny", distributed_executor_backend="ray", **SMALL)


# torchrun

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
WRONG = [
    ({"RANK": None}, "needs the variable RANK, which torchrun sets"),
    ({"MASTER_PORT": ""}, "needs the variable MASTER_PORT"),
    ({"RANK": "first"}, "environment variable RANK: 'first' is not a whole number"),
    ({"WORLD_SIZE": "4"}, "is 1, but WORLD_SIZE is 4: start as many processes as workers"),
    ({"RANK": "1"}, "RANK 1 or LOCAL_WORLD_SIZE 1 does not fit WORLD_SIZE 1"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_variables_that_torchrun_would_not_set(
    changes: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        LLM("gpt2-tiny", distributed_executor_backend="external_launcher", **SMALL)


def test_a_server_cannot_be_launched_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineStartError, match="a server gets them in one process only: use mp"):
        LLM("gpt2-tiny", distributed_executor_backend="external_launcher", multiprocess=True, **SMALL)


@pytest.mark.parametrize("more", [[], ["-dp", "2"], ["--api-server-count", "2"], ["--in-process"], ["--dry-run"]])
def test_serve_refuses_the_launcher_before_it_starts_anything(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    flags = ["--distributed-executor-backend", "external_launcher", "--port", "0", "--trace", str(tmp_path / "traces")]
    assert main(["serve", "gpt2-tiny", *flags, *more]) == 2 and not (tmp_path / "traces").exists()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("stages: error: ") and line.endswith("a server gets them in one process only: use mp")


def test_a_launched_process_in_a_script(monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with LLM("gpt2-tiny", distributed_executor_backend="external_launcher", **TIGHT) as llm:
        assert isinstance(executor_of(llm), ExecutorWithExternalLauncher)
        assert tokens(llm, *workload()) == expected


def torchrun(count: int, *flags: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    generate = ["-m", "stage03_engine", "generate", "gpt2-tiny", "To be, or", "--kv-cache-memory-bytes", "50000000"]
    backend = ["--distributed-executor-backend", "external_launcher"]
    return subprocess.run([*launch, *generate, *backend, *flags], capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=needs_slices)])
@pytest.mark.slow(keep="2")
def test_torchrun_prints_the_answer_once(count: int, tmp_path: Path) -> None:
    with LLM("gpt2-tiny", **SMALL) as llm:
        [answer] = llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=12))
    run = torchrun(count, "-tp", str(count), "--max-tokens", "12", "--trace", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"To be, or{answer.outputs[0].text}\n"
    lanes = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert lanes == ({"LLM"} if count == 1 else {"LLM_TP0", "LLM_TP1"})
    assert {event.proc for event in read_run(tmp_path).events} == lanes


def test_a_launched_process_that_stays_alone_says_so() -> None:
    """The second one never comes."""
    environment = os.environ | LAUNCHED | {"WORLD_SIZE": "2", "MASTER_PORT": "0"}
    words = ["generate", "gpt2-tiny", "O", "-tp", "2", "--distributed-executor-backend", "external_launcher"]
    run = subprocess.run(
        [sys.executable, "-m", "stage03_engine", *words, "--distributed-timeout-seconds", "1"],
        capture_output=True, text=True, env=environment, timeout=PATIENCE,
    )  # fmt: skip
    errors = [line for line in run.stderr.splitlines() if line.startswith("stages: error:")]
    assert run.returncode == 2 and len(errors) == 1 and "Traceback" not in run.stderr, run.stderr
    assert "the workers did not meet within 1 s (--distributed-timeout-seconds)" in errors[0]


SAME = """
    import json, os, sys
    from stage03_engine.llm import LLM
    from stage03_engine.sampling_params import SamplingParams
    prompts, most, settings = json.loads(sys.argv[1])
    with LLM("gpt2-tiny", distributed_executor_backend="external_launcher", **settings) as llm:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in most]
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with open(sys.argv[2] + os.environ["RANK"], "w") as file:
        json.dump(tokens, file)
"""


@needs_slices
@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 1, marks=pytest.mark.long), (1, 2)])
@pytest.mark.slow
def test_every_launched_process_has_the_same_tokens(
    tp: int, pp: int, tmp_path: Path, expected: list[list[int]]
) -> None:
    script = tmp_path / "same.py"
    script.write_text(textwrap.dedent(SAME))
    prompts, params = workload()
    settings = TIGHT | {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    job = json.dumps([prompts, [each.max_tokens for each in params], settings])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run([*launch, job, str(tmp_path / "tokens")], capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    assert [json.loads((tmp_path / f"tokens{rank}").read_text()) for rank in range(2)] == [expected] * 2


def launched(rank: int) -> ExecutorWithExternalLauncher:
    """One of two, without a model."""
    executor = object.__new__(ExecutorWithExternalLauncher)
    executor.ranks, executor.worker = Ranks(rank, 2, 1), SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    return executor


def test_launched_processes_compare_their_settings_and_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here two threads, that meet in all_reduce."""
    barrier, given = threading.Barrier(2), dict[int, torch.Tensor]()

    def all_reduce(value: torch.Tensor, how: Any) -> None:
        given[threading.get_ident()] = value.clone()
        barrier.wait(PATIENCE)
        value.copy_(torch.stack([*given.values()]).amax(0))
        barrier.wait(PATIENCE)

    def errors(method: str, *values: Any) -> list[str]:
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(getattr(launched(rank), method), value) for rank, value in enumerate(values)]
        given.clear()
        return [str(each.exception()) for each in both]

    monkeypatch.setattr(external_launcher.dist, "all_reduce", all_reduce)
    one, other = config(max_num_seqs=8, dtype="float32"), config(max_num_seqs=9, dtype="bfloat16", num_threads=3)
    steps = [SchedulerOutput(5, [], {"r": [1]}, {"r": count}, [], []) for count in (1, 2)]
    assert errors("_compare", one, one) == errors("_check", steps[0], steps[0]) == ["None", "None"]
    said = "different settings: dtype (rank {} has {}), max_num_seqs (rank {} has {}); start all with the same"
    for rank, error in enumerate(errors("_compare", one, other)):
        assert error.endswith(said.format(rank, ("'float32'", "'bfloat16'")[rank], rank, (8, 9)[rank]))
    for error in errors("_check", *steps):
        assert error.startswith("step 5: the processes of the launcher have decided differently")


def test_launched_processes_fail_for_a_reason_that_one_of_them_says(tmp_path: Path) -> None:
    """Each writes it for torchrun's report."""
    for rank, raised in enumerate((ConfigError, SystemExit)):
        report = tmp_path / str(rank)
        with pytest.raises(raised):
            external_launcher._fail_together(
                ConfigError("no"), {"TORCHELASTIC_ERROR_FILE": str(report), "LOCAL_RANK": str(rank)}
            )
        assert json.loads(report.read_text())["message"]["extraInfo"]["py_callstack"] == "stages: error: no"


DIFFERENT = """
    import os
    from stage03_engine.llm import LLM
    from stage03_engine.sampling_params import SamplingParams
    llm = LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    llm.generate("O" * (1 + int(os.environ["RANK"])), SamplingParams(max_tokens=4))
"""


@needs_slices
@pytest.mark.slow
def test_processes_that_decide_differently_are_told(tmp_path: Path) -> None:
    script = tmp_path / "different.py"
    script.write_text(textwrap.dedent(DIFFERENT))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(launch, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode and run.stderr.count("Traceback (most recent call last)") <= 2, (
        "one of ours, one of torchrun's"
    )
    _ends_with_the_reason(run.stderr, "have decided differently")


def _ends_with_the_reason(stderr: str, reason: str) -> None:
    """At most one process says it, and torchrun's report ends with it, whichever process it saw end first."""
    lines = [line for line in stderr.splitlines() if reason in line]
    assert sum(not line.startswith("  traceback") for line in lines) <= 1, stderr
    assert lines[-1].startswith("  traceback : stages: error: ") and stderr.splitlines()[-2] == lines[-1], stderr


@pytest.mark.slow
def test_a_number_of_processes_that_does_not_fit_is_said_once() -> None:
    run = torchrun(2, "-tp", "4")
    assert run.returncode and run.stdout == ""
    _ends_with_the_reason(run.stderr, "is 4, but WORLD_SIZE is 2: start as many processes as workers")


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    wait_until(lambda: not workers_of(), "a worker stays")
