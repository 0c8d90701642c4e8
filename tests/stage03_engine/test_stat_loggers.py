"""Stat loggers of a user's own: `AsyncLLM(..., stat_loggers=[factory])`, and those of an installed package."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from server_under_test import RecordingEcho, ServerProcess, byte_config

from stage03_engine.config import ObservabilityConfig, VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.stat_loggers.stat_loggers import StatLoggerBase
from stage03_engine.frontend.metrics import IterationStats, StatLogger
from stage03_engine.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent.parent


class Counting(StatLoggerBase):
    """In vLLM's form, as a user of it would write it."""

    made: list[Counting] = []

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.config, self.engine_index = vllm_config, engine_index
        self.said: list[str] = []
        self.tokens, self.finished, self.first, self.most = 0, [], [], 0  # type: ignore[var-annotated]
        Counting.made.append(self)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        assert engine_idx == self.engine_index and mm_cache_stats is None
        self.said.append("record")
        self.tokens += iteration_stats.num_generation_tokens
        self.finished += iteration_stats.finished_requests
        self.first += iteration_stats.time_to_first_tokens_iter
        if scheduler_stats is not None:
            self.most = max(self.most, scheduler_stats.num_running_reqs)

    def log(self) -> None:
        self.said.append("log")

    def log_engine_initialized(self) -> None:
        self.said.append("initialized")


class Plain:
    """Inherits from nothing, and takes what the brief form has."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.initialized = False

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int) -> None:
        self.steps.append(engine_idx)

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None:
        self.initialized = True


class Objects(StatLogger):
    def record(self, *numbers: Any) -> None: ...


@pytest.fixture(autouse=True)
def nobody_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "made", [])


def quick() -> VllmConfig:
    config = byte_config()
    return VllmConfig(
        model_config=config.model_config, observability_config=ObservabilityConfig(log_stats_interval=0.1)
    )


async def asked(loggers: Sequence[Any], config: VllmConfig | None = None, seconds: float = 0.0) -> AsyncLLM:
    """An engine that has answered a request of 5 tokens, and rested."""
    config = config or byte_config()
    llm = AsyncLLM.from_vllm_config(config, client=RecordingEcho(config=config), stat_loggers=loggers)
    try:
        await llm.start()
        request = llm.input_processor.process_inputs("r", "abcdefgh", SamplingParams(max_tokens=5, ignore_eos=True))
        outputs = [output async for output in llm.generate(request, request.sampling_params, "r")]
        assert outputs[-1].finished
        await asyncio.sleep(seconds)
    finally:
        llm.shutdown()
    return llm


def test_a_factory_s_logger_is_told_every_step() -> None:
    llm = asyncio.run(asked([Counting], quick(), seconds=0.3))
    [own] = Counting.made
    assert own.config is llm.vllm_config and own.said[0] == "initialized" and own.said[1] == "record"
    assert own.tokens == 5 and len(own.first) == 1 and own.first[0] > 0
    [finished] = own.finished
    assert (finished.num_prompt_tokens, finished.num_generation_tokens, finished.finish_reason) == (8, 5, "length")
    assert finished.e2e_latency >= finished.inference_time >= finished.decode_time > 0
    assert own.said.count("initialized") == 1 and own.said[-1] == "log", "once more after the work"


def test_the_default_logger_stays_beside_factories_alone() -> None:
    beside = asyncio.run(asked([Counting])).stat_loggers
    assert [type(each).__name__ for each in beside] == ["LoggingStatLogger", "OwnStatLogger"]
    chosen = asyncio.run(asked([Objects(), Counting])).stat_loggers
    assert [type(each).__name__ for each in chosen] == ["Objects", "OwnStatLogger"]


def test_any_object_with_the_methods_will_do() -> None:
    own = Plain()
    asyncio.run(asked([lambda config, index: own]))
    assert own.initialized and own.steps and set(own.steps) == {0}


def test_each_engine_has_one_those_that_come_later_too() -> None:
    async def told() -> None:
        llm = await asked([Counting])
        llm.stat_loggers[-1].record(None, IterationStats(), 3)

    asyncio.run(told())
    assert [each.engine_index for each in Counting.made] == [0, 3]
    assert Counting.made[1].said == ["initialized", "record"]


class Failing(Counting):
    def record(self, *numbers: Any, **stats: Any) -> None:
        super().record(*numbers, **stats)
        raise ZeroDivisionError("of mine")


def test_one_that_raises_is_left_out_and_the_request_answered(caplog: pytest.LogCaptureFixture) -> None:
    llm = asyncio.run(asked([Failing]))
    assert not llm.errored
    assert Counting.made[0].said == ["initialized", "record"]
    said = [record.getMessage() for record in caplog.records if "stat logger" in record.getMessage()]
    assert said == ["The stat logger Failing of engine 0 failed, and is called no more: ZeroDivisionError: of mine"]


def raising(config: VllmConfig, index: int) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (raising, "the stat logger raising: KeyError: 'mine'"),
        (lambda config, index: object(), "a object, has no record and no log and no log_engine_initialized"),
        ("own:Logger", "a stat logger is a StatLogger, or what makes one .*, not 'own:Logger'"),
        (dict, "the stat logger dict: TypeError"),
    ],
)
def test_what_makes_no_logger_is_refused_before_the_engine_starts(factory: Any, said: str) -> None:
    client = RecordingEcho()
    client.start_process = lambda: pytest.fail("it was started")  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=said):
        AsyncLLM.from_vllm_config(byte_config(), client=client, stat_loggers=[factory])


PACKAGE = """
import os
class ToFile:
    def __init__(self, vllm_config, engine_index):
        self.name = f"{vllm_config.model_config.model}-{engine_index}"
        self.note("made")
    def note(self, word):
        with open(os.environ["NOTES"], "a") as file:
            print(self.name, word, file=file)
    def record(self, scheduler_stats=None, iteration_stats=None, **more):
        if iteration_stats.num_generation_tokens:
            self.note("tokens")
    def log(self):
        self.note("log")
    def log_engine_initialized(self):
        self.note("initialized")
"""


def install(site: Path, value: str) -> None:
    site.mkdir()
    (site / "to_file.py").write_text(PACKAGE)
    (info := site / "to_file-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: to-file\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.stat_logger_plugins]\nto_file = {value}\n")


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    (tmp_path / "notes").touch()
    return lambda: (tmp_path / "notes").read_text().splitlines()


@pytest.mark.parametrize("words", [(), ("--disable-log-stats",)])
def test_a_package_s_logger_is_in_the_server(
    words: tuple[str, ...], tmp_path: Path, notes: Callable[[], list[str]]
) -> None:
    install(tmp_path / "site", "to_file:ToFile")
    with closing(ServerProcess("gpt2-tiny", "--engine", "echo", "--port", "0", *words)) as server:
        url = server.wait_until_ready()
        assert notes() == ["gpt2-tiny-0 made", "gpt2-tiny-0 initialized"]
        body = {"prompt": "To be", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False).status_code == 200
        assert "gpt2-tiny-0 tokens" in notes()
        assert "vllm:generation_tokens" in httpx.get(f"{url}/metrics", timeout=PATIENCE, trust_env=False).text


@pytest.mark.parametrize("value", ["gone:Logger", "to_file:os", "to_file:PACKAGE"])
def test_a_package_s_logger_that_cannot_be_made_is_one_line(
    value: str, tmp_path: Path, notes: Callable[[], list[str]]
) -> None:
    install(tmp_path / "site", value)
    command = [sys.executable, "-m", "stage01_cli", "serve", "gpt2-tiny", "--engine", "echo", "--port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    said = ended.stderr.splitlines()
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert said[-1].startswith(f"stages: error: {value}, which an installed package adds as to_file: ")
    assert said[-1].endswith("; STAGES_PLUGINS= leaves it out")
