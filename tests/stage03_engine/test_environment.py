"""vLLM's environment variables, and what is said of those that nothing reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage01_cli.main import main
from stage02_server.cli_args import FrontendArgs
from stage03_engine.arg_utils import EngineArgs, engine_settings
from stage03_engine.args.features.vllm_variables.variables import COUNTERPARTS
from stage03_engine.args.fields import settings_of
from stage03_engine.args.unknown import SERVER_SETTINGS, feature_settings
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

DRY = ["serve", "gpt2-tiny", "--device", "cpu", "--dry-run"]
CORE = str(min(os.sched_getaffinity(0)))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("STAGES_")]:
        monkeypatch.delenv(name)
    yield


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Setting -> value and origin."""
    assert main([*DRY, *words]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return {name: " ".join(rest[0].split()) for name, *rest in rows if rest}


@pytest.mark.parametrize(
    ("variable", "text", "setting", "shown"),
    [
        ("VLLM_API_KEY", "[x", "api_key", "***"),  # a key is text, not a JSON list
        ("VLLM_LOGGING_LEVEL", "debug", "log_level", "DEBUG"),
        ("VLLM_LOGGING_LEVEL", "warn", "log_level", "WARNING"),  # Python's other names, which vLLM takes
        ("VLLM_LOGGING_LEVEL", "FATAL", "log_level", "CRITICAL"),
        ("VLLM_CONFIGURE_LOGGING", "0", "configure_logging", "false"),
        ("VLLM_LOG_STATS_INTERVAL", "3", "log_stats_interval", "3.0"),
        ("VLLM_TORCH_PROFILER_DIR", "/tmp/profiles", "profiler_dir", "/tmp/profiles"),
        ("VLLM_TORCH_PROFILER_WITH_STACK", "0", "torch_profiler_with_stack", "false"),
        ("VLLM_TORCH_PROFILER_RECORD_SHAPES", "1", "torch_profiler_record_shapes", "true"),
        ("VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY", "1", "torch_profiler_with_memory", "true"),
        ("VLLM_TORCH_PROFILER_WITH_FLOPS", "1", "torch_profiler_with_flops", "true"),
        ("VLLM_TORCH_PROFILER_USE_GZIP", "0", "torch_profiler_use_gzip", "false"),
        ("VLLM_CPU_KVCACHE_SPACE", "2", "kv_cache_memory_bytes", str(2 << 30)),
        ("VLLM_CPU_OMP_THREADS_BIND", CORE, "cpu_omp_threads_bind", CORE),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "in_process", "true"),
        ("VLLM_SERVER_DEV_MODE", "1", "server_dev_mode", "true"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", "allow_runtime_lora_updating", "true"),
        ("VLLM_BATCH_INVARIANT", "1", "batch_invariant", "true"),
        ("FORWARDED_ALLOW_IPS", "10.0.0.0/8", "forwarded_allow_ips", "10.0.0.0/8"),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "9", "timeout_keep_alive", "9"),
    ],
)
def test_a_variable_sets_its_counterpart(
    variable: str,
    text: str,
    setting: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)
    assert dry_run(capsys)[setting] == f"{shown} environment ({variable})"


def test_flags_and_our_own_variables_go_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    file = tmp_path / "serve.yaml"
    file.write_text("log-level: DEBUG")
    assert dry_run(capsys, "--config", str(file))["log_level"] == "ERROR environment (VLLM_LOGGING_LEVEL)"
    monkeypatch.setenv("STAGES_LOG_LEVEL", "WARNING")
    assert dry_run(capsys)["log_level"] == "WARNING environment (STAGES_LOG_LEVEL)"
    assert dry_run(capsys, "--log-level", "INFO")["log_level"] == "INFO command line (--log-level)"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")  # as in vLLM: not said
    assert dry_run(capsys)["kv_cache_memory_bytes"] == "none default"


def test_cores_are_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORE)
    assert dry_run(capsys)["num_threads"] == "1 detected (--cpu-omp-threads-bind)"
    assert dry_run(capsys, "--num-threads", "5")["num_threads"] == "5 command line (--num-threads)"
    monkeypatch.delenv("OMP_NUM_THREADS")
    for free in ("auto", "nobind"):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", free)
        assert dry_run(capsys)["num_threads"].endswith("cores)")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("VLLM_API_KEY", "  "), ("VLLM_API_KEY", "k\u00e9y"), ("VLLM_LOGGING_LEVEL", "LOUD"), ("VLLM_CONFIGURE_LOGGING", "2"),
        ("VLLM_LOG_STATS_INTERVAL", "0"), ("VLLM_CPU_KVCACHE_SPACE", "4GB"), ("VLLM_CPU_KVCACHE_SPACE", "-1"),
        ("VLLM_CPU_KVCACHE_SPACE", "9" * 30), ("VLLM_CPU_OMP_THREADS_BIND", "3-1"), ("VLLM_CPU_OMP_THREADS_BIND", "0|1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "99999"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "maybe"), ("VLLM_USE_V1", "0"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "fork"), ("VLLM_WORKER_MULTIPROC_METHOD", "threads"), ("VLLM_SERVER_DEV_MODE", "on-ish"), ("VLLM_TORCH_PROFILER_WITH_STACK", "2"),
        ("VLLM_LOGGING_CONFIG_PATH", "/no/such/file"),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_line(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, text)
    assert main(DRY) == 2
    (line,) = capsys.readouterr().err.splitlines()
    setting = COUNTERPARTS[variable].setting if variable in COUNTERPARTS else variable
    assert line.startswith("stages: error: ") and (variable in line or setting in line)
    if variable == "VLLM_API_KEY":
        assert text not in line


def test_what_is_so_here_anyway_is_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for variable, text in (
        ("VLLM_USE_V1", "1"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "forkserver"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        monkeypatch.setenv(variable, text)
    dry_run(capsys)
    assert not caplog.records


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VLLM_PORT", "VLLM_ATTENTION_BACKEND", "STAGES_BLOCKSIZE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("STAGES_PORT", "81")
    monkeypatch.setenv("STAGES_MAX_NUM_QUEUED_REQS", "81")


@pytest.mark.parametrize("from_python", [False, True])
def test_others_are_named_in_one_warning(
    from_python: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    unread(monkeypatch)
    if from_python:
        EngineArgs.from_kwargs(model="gpt2-tiny")
    else:
        dry_run(capsys)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.endswith(": STAGES_BLOCKSIZE, VLLM_ATTENTION_BACKEND, VLLM_PORT")


def test_others_can_be_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    unread(monkeypatch)
    assert main([*DRY, "--fail-on-environ-validation"]) == 2
    assert "STAGES_BLOCKSIZE, VLLM_ATTENTION_BACKEND, VLLM_PORT" in capsys.readouterr().err


def test_every_setting_of_every_command_is_known() -> None:
    """The lists that stand for the stages above, and for features, are whole."""
    sections = [setting.name for setting in settings_of(FrontendArgs)]
    assert set(sections) <= feature_settings() | set(SERVER_SETTINGS)
    assert set(SERVER_SETTINGS) <= set(sections)
    settings = {*sections, *(setting.name for setting in engine_settings())}
    assert {counterpart.setting for counterpart in COUNTERPARTS.values()} <= settings


def test_an_engine_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `LLM`; what is said in Python goes first. The engine is bound to its cores, and named in `ps`."""
    import psutil

    def kind(**more: Any) -> str:
        with LLM("gpt2-tiny", max_num_seqs=2, num_gpu_blocks_override=40, **more) as llm:
            children = [
                child
                for child in psutil.Process().children()
                if child.cmdline()[0].startswith("stages::EngineCore_DP0")
            ]
            for child in children:
                assert child.cpu_affinity() == [int(CORE)]
            requests = [llm.input_processor.process_inputs("a", "To", SamplingParams(max_tokens=1))]
            assert llm.run_all(requests, ["To"])[0].finished
            assert len(children) == (type(llm.engine_core).__name__ == "SyncMPClient")
            return type(llm.engine_core).__name__

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORE)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert kind() == "InprocClient"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert kind() == "SyncMPClient" and kind(multiprocess=False) == "InprocClient"
