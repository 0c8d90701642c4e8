"""Executors and workers of a user's own: `--distributed-executor-backend module:Class`, `--worker-cls module:Class`."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from server_under_test import ServerProcess

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.worker import UniProcExecutor, Worker
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=6)
OWN = """
import os
from pathlib import Path
from stage03_engine.core.features.distributed.multiproc_executor import MultiprocExecutor
from stage03_engine.core.worker import Executor, UniProcExecutor, Worker

def note(word):
    with open(os.environ["NOTES"], "a") as file:
        print(word, os.getpid(), file=file)

class Noting(UniProcExecutor):
    def execute_model(self, scheduler_output):
        note("step")
        return super().execute_model(scheduler_output)

class NotingWorker(Worker):
    def __init__(self, config):
        note("worker")
        super().__init__(config)

class Processes(MultiprocExecutor):
    def begin_step(self, scheduler_output):
        note("step")
        super().begin_step(scheduler_output)

class Unfinished(Executor):
    def __init__(self, config):
        pass

class Raises(UniProcExecutor):
    def __init__(self, config):
        raise KeyError("no key\\nof mine")

class RaisingWorker(Worker):
    def __init__(self, config):
        raise RuntimeError("no device of mine")

class Outer:
    class Inner(UniProcExecutor):
        pass

function = print
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's parts, importable here and in other processes, note what they do."""
    (tmp_path / "own_parts.py").write_text(OWN)
    (tmp_path / "broken_part.py").write_text("class :\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name in ("own_parts", "broken_part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


def generated(**settings: Any) -> list[list[int]]:
    with LLM("gpt2-tiny", **SMALL | settings) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(["ROMEO:", "K"], PARAMS)]


def noted(notes: Path) -> dict[str, set[int]]:
    """Word -> the processes that noted it."""
    found: dict[str, set[int]] = {}
    for word, pid in (line.split() for line in notes.read_text().splitlines()):
        found.setdefault(word, set()).add(int(pid))
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generated()


@pytest.mark.parametrize("path", ["own_parts:Noting", "own_parts.Noting", "own_parts:Outer.Inner"])
def test_an_executor_of_ones_own_runs_the_steps(path: str, notes: Path, expected: list[list[int]]) -> None:
    assert generated(distributed_executor_backend=path) == expected
    assert noted(notes) == ({} if "Inner" in path else {"step": {os.getpid()}})


def test_it_may_have_several_workers_each_of_ones_own(notes: Path, expected: list[list[int]]) -> None:
    own = {"distributed_executor_backend": "own_parts:Processes", "worker_cls": "own_parts.NotingWorker"}
    assert generated(tensor_parallel_size=2, **own) == expected
    found = noted(notes)
    assert found["step"] == {os.getpid()} and len(found["worker"]) == 2 and os.getpid() not in found["worker"]


@pytest.mark.slow(keep="mp")
@pytest.mark.parametrize("backend", [None, "mp"])
def test_a_worker_of_ones_own_serves(
    backend: str | None, notes: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    own: dict[str, Any] = {"worker_cls": "own_parts:NotingWorker", "multiprocess": True, "trace": str(tmp_path / "run")}
    assert generated(distributed_executor_backend=backend, **own) == expected
    assert len(noted(notes)["worker"]) == 1
    [event] = read_run(tmp_path / "run").named("own_class.chosen")
    assert event.args == {"flag": "--worker-cls", "path": "own_parts:NotingWorker"}


class Mine(UniProcExecutor):
    pass


class MyWorker(Worker):
    pass


def test_a_class_may_be_given_itself(expected: list[list[int]]) -> None:
    """As vLLM takes it, in Python."""
    assert generated(distributed_executor_backend=Mine, worker_cls=MyWorker) == expected


BEFORE: dict[str, tuple[dict[str, Any], str]] = {
    "no such word": (
        {"distributed_executor_backend": "mpi"},
        "distributed_executor_backend: 'mpi' is not one of uni, mp, ray, external_launcher, nor a class of your own, module:Class",
    ),
    "no module": (
        {"distributed_executor_backend": "nowhere:Class"},
        "--distributed-executor-backend nowhere:Class: there is no module nowhere",
    ),
    "no module, with a dot": (
        {"distributed_executor_backend": "own_parts.nowhere.Class"},
        "--distributed-executor-backend own_parts.nowhere.Class: there is no module own_parts.nowhere",
    ),
    "no class": ({"worker_cls": "own_parts:"}, "--worker-cls must look like module:Class, not 'own_parts:'"),
    "one word": ({"worker_cls": "Worker"}, "--worker-cls must look like module:Class, not 'Worker'"),
    "no module of a worker": ({"worker_cls": "a.B"}, "--worker-cls a.B: there is no module a"),
    "no name": ({"worker_cls": ".Worker"}, "--worker-cls must look like module:Class, not '.Worker'"),
    "no absolute name": (
        {"worker_cls": ".own:Worker"},
        "--worker-cls .own:Worker: ",
    ),
    "no module of a scheduler": (
        {"scheduler_cls": "no.such.Scheduler"},
        "--scheduler-cls no.such.Scheduler: there is no module no.such",
    ),
    "several machines": (
        {"distributed_executor_backend": "own_parts:Noting", "nnodes": 2, "tensor_parallel_size": 2},
        "nnodes = 2 works with distributed_executor_backend mp alone, not with own_parts:Noting",
    ),
}


@pytest.mark.parametrize("case", BEFORE)
def test_what_the_settings_show_is_refused_before_anything_starts(case: str, notes: Path) -> None:
    settings, said = BEFORE[case]
    with pytest.raises(ConfigError) as refused:
        EngineArgs.from_kwargs(model="gpt2-tiny", **settings)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


LATER: dict[str, tuple[dict[str, Any], str]] = {
    "no such class": (
        {"distributed_executor_backend": "own_parts:Nobody"},
        "--distributed-executor-backend own_parts:Nobody: module 'own_parts' has no attribute 'Nobody'",
    ),
    "no class": (
        {"distributed_executor_backend": "own_parts:function"},
        "--distributed-executor-backend own_parts:function: this is not a class",
    ),
    "another class": (
        {"distributed_executor_backend": "builtins:dict"},
        "--distributed-executor-backend builtins:dict: not a subclass of stage03_engine.core.worker:Executor",
    ),
    "no methods": (
        {"distributed_executor_backend": "own_parts:Unfinished"},
        "--distributed-executor-backend own_parts:Unfinished: TypeError: Can't instantiate abstract class Unfinished",
    ),
    "raises": (
        {"distributed_executor_backend": "own_parts:Raises"},
        "--distributed-executor-backend own_parts:Raises: KeyError: 'no key\\nof mine'",
    ),
    "no Python": (
        {"distributed_executor_backend": "broken_part:Class"},
        "--distributed-executor-backend broken_part:Class: SyntaxError: ",
    ),
    "one worker": (
        {"distributed_executor_backend": "own_parts:Noting", "tensor_parallel_size": 2},
        "--distributed-executor-backend own_parts:Noting: this is one worker, and tensor_parallel_size x pipeline_parallel_size is 2",
    ),
    "no worker": (
        {"worker_cls": "builtins:dict"},
        "--worker-cls builtins:dict: not a subclass of stage03_engine.core.worker:Worker",
    ),
    "a worker that raises": (
        {"worker_cls": "own_parts:RaisingWorker"},
        "--worker-cls own_parts:RaisingWorker: RuntimeError: no device of mine",
    ),
    "a worker that raises in its process": (
        {"worker_cls": "own_parts:RaisingWorker", "distributed_executor_backend": "mp"},
        "Worker_TP0: --worker-cls own_parts:RaisingWorker: RuntimeError: no device of mine",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_what_only_the_class_shows_is_one_line(case: str, notes: Path) -> None:
    settings, said = LATER[case]
    with pytest.raises(StagesError) as refused:
        LLM("gpt2-tiny", **SMALL | settings)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_a_server_that_cannot_start_says_one_line(notes: Path) -> None:
    words = ("--distributed-executor-backend", "own_parts.Raises", "--kv-cache-memory-bytes", "20000000")
    with closing(ServerProcess("gpt2-tiny", "--port", "0", *words)) as server:
        assert server.wait() == 1
    assert "Traceback" not in "".join(server.lines)
    assert sum("--distributed-executor-backend own_parts.Raises: KeyError" in line for line in server.lines) == 1
