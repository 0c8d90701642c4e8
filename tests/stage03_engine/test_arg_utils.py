"""From settings to a VllmConfig: what is detected, and which combinations are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from stage03_engine.arg_utils import AsyncEngineArgs, EngineArgs
from stage03_engine.args import resolve as detect
from stage03_engine.args.command import WAITING, cli_env_setup, run_command
from stage03_engine.args.cpu import Cores, find_cores
from stage03_engine.args.features.number_format import number_format
from stage03_engine.args.features.number_format.manifest import FastestFormat
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.args.processes import engine_environment
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, EngineStartError

DUMMY = {"model": "gpt2", "load_format": "dummy", "device": "cpu"}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STAGES_")]:
        monkeypatch.delenv(name)


def test_everything_open_is_detected() -> None:
    config = EngineArgs.from_kwargs(**DUMMY)
    assert config.model_config.dtype == number_format.cpu_dtype(config.shape)[0]
    assert config.max_model_len == config.shape.max_position_embeddings == 1024
    assert config.device_config.num_threads == find_cores().compute
    assert 1 <= find_cores().compute <= (os.cpu_count() or 1)


def test_the_device_is_named_and_float32_goes_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs.from_kwargs(model="gpt2", load_format="dummy")
    assert config.device_config.device in ("cpu", "cuda")
    monkeypatch.setattr(number_format, "gpu_capability", lambda: (9, 0))
    on_gpu = EngineArgs.from_kwargs(model="gpt2", load_format="dummy", device="cuda")
    assert (on_gpu.shape.torch_dtype, on_gpu.model_config.dtype) == ("float32", "bfloat16")


def test_the_alias_is_followed_and_said() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("model_tag")
    AsyncEngineArgs.add_cli_args(parser)
    words = ["gpt-2", "--load-format=dummy"]
    config, sources = AsyncEngineArgs.from_cli_args(parser.parse_args(words), {}).create_engine_config()
    assert config.model_config.model == sources["model"].value == "gpt2"
    assert sources["model"].origin == "command line (model tag, alias gpt-2)"
    assert config == EngineArgs.from_kwargs(**DUMMY | {"device": "auto"})


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_model_len": 1025}, "max_model_len 1025 is more than the model's 1024 positions"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens 255 is less than max_num_seqs 256"),
        ({"max_num_batched_tokens": 1023, "enable_chunked_prefill": False}, "less than max_model_len 1024"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_seqs": -1}, "max_num_seqs must be at least 1"),
        ({"stream_interval": 0}, "stream_interval must be at least 1"),
        ({"max_num_seqs": 0, "max_num_batched_tokens": 0}, "max_num_seqs must be at least 1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be at least 1"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override must be at least 2"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be in \\(0, 1\\]"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization must be in \\(0, 1\\]"),
        ({"gpu_memory_utilization": float("nan")}, "nan is not a finite number"),
        ({"gpu_memory_utilization": "inf"}, "inf is not a finite number"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds must be at least 1"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "uni is one worker, and .* is 2"),
        ({"distributed_executor_backend": "mpi"}, "'mpi' is not one of uni, mp, ray, external_launcher"),
        ({"distributed_executor_backend": "mp", "profiler_dir": "p"}, "profiler_dir records the engine process"),
        ({"data_parallel_size": 65}, "data_parallel_size must be at most 64"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 2},
            "data_parallel_rank 2 must be less than data_parallel_size, the number .*, which is 2",
        ),
        ({"data_parallel_size": 2, "data_parallel_rank": -1}, "data_parallel_rank must be at least 0"),
        (
            {"data_parallel_size": 2, "data_parallel_external_lb": True},
            "data_parallel_external_lb needs data_parallel_rank",
        ),
        ({"data_parallel_size": 2, "cpu_omp_threads_bind": "0"}, "cpu_omp_threads_bind names the cores of one engine"),
        ({"data_parallel_restart": -1}, "data_parallel_restart must be at least 0"),
        (
            {"data_parallel_routing": "prefix", "enable_prefix_caching": False},
            "data_parallel_routing prefix needs the prefix cache",
        ),
        ({"data_parallel_routing": "random"}, "'random' is not one of load, prefix"),
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2},
            "of 4 engines 2 are on this machine: data_parallel_address must say where the head listens for the others",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 3, "data_parallel_start_rank": 2},
            "3 engines from number 2 on are more than data_parallel_size, which is 4",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_start_rank": 2},
            "0 engines from number 2 on are more than data_parallel_size, which is 2",
        ),
        ({"data_parallel_size": 2, "data_parallel_size_local": -1}, "data_parallel_size_local must be at least 0"),
        ({"data_parallel_size": 2, "data_parallel_start_rank": -1}, "data_parallel_start_rank must be at least 0"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_size_local": 1},
            "data_parallel_rank is for a server with one engine: leave out",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_hybrid_lb": True},
            "data_parallel_hybrid_lb needs data_parallel_start_rank",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 0},
            "data_parallel_hybrid_lb needs engines on this machine; data_parallel_size_local is 0",
        ),
        (
            {
                "data_parallel_size": 2,
                "data_parallel_size_local": 1,
                "data_parallel_address": "127.0.0.1",
                "data_parallel_rpc_port": 65536,
            },
            r"data_parallel_rpc_port must be in \[1, 65535\], not 65536",
        ),
        ({"dtype": "int4"}, "'int4' is not one of auto, float32"),
        ({"blok_size": 4}, "unknown setting 'blok_size'; did you mean block_size\\?"),
        ({"shape": None}, "unknown setting 'shape'"),
        ({"tensor_parallel_siz": 2}, "did you mean tensor_parallel_size"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs.from_kwargs(**DUMMY | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 1024, "max_num_batched_tokens": 1024, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"gpu_memory_utilization": 1},
        {"num_gpu_blocks_override": 2, "block_size": 1, "max_model_len": 1, "num_threads": 1},
        {"kv_cache_memory_bytes": "1G"},
    ],
)
def test_settings_at_the_edge_are_accepted(settings: dict[str, Any]) -> None:
    EngineArgs.from_kwargs(**DUMMY | settings)


@given(st.integers(-3, 40), st.integers(-3, 40), st.integers(-3, 1100), st.booleans())
def test_what_is_accepted_can_make_progress(seqs: int, budget: int, length: int, chunked: bool) -> None:
    """Independent statement of the rules: each running request gets a token per step, each prompt fits at some time."""
    settings = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "max_model_len": length}
    longest = 1024 if length == -1 else length  # -1: as long as the model's context, and the memory, allow
    possible = 1 <= seqs <= budget and 1 <= longest <= 1024 and (chunked or budget >= longest)
    try:
        EngineArgs.from_kwargs(**DUMMY, **settings, enable_chunked_prefill=chunked)
        accepted = True
    except ConfigError:
        accepted = False
    assert accepted == possible


def test_keywords_take_the_rank_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGES_BLOCK_SIZE", "4")
    monkeypatch.setenv("STAGES_SEED", "7")
    config = EngineArgs.from_kwargs(**DUMMY, block_size=8)
    assert (config.cache_config.block_size, config.model_config.seed) == (8, 7)


def test_a_config_survives_the_handshake() -> None:
    config = EngineArgs.from_kwargs(**DUMMY)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=VllmConfig) == config


def test_a_hidden_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(detect, "_NVIDIA_DRIVER", driver)
    monkeypatch.setattr(detect, "version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect.detect_device()[0] == "cuda"
    monkeypatch.setattr(detect, "version", lambda name: "2.13.0+cpu")
    assert detect.detect_device() == ("cpu", "torch is built without CUDA")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect.detect_device()[0] == "cpu"


def test_commands_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> int:
        raise error

    assert run_command(lambda: 7) == 7
    assert run_command(lambda: fail(ConfigError("two\n  lines of a model's file\x1b[31m"))) == 2
    assert capsys.readouterr().err == "stages: error: two lines of a model's file\\x1b[31m\n"
    assert run_command(lambda: fail(EngineStartError("no memory"))) == 1
    assert capsys.readouterr().err == "stages: error: no memory\n"
    assert run_command(lambda: fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_what_the_user_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WAITING, "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "to be removed at the end")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert cli_env_setup() == {"TOKENIZERS_PARALLELISM": "false"}
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE" and "GOMP_SPINCOUNT" not in os.environ
    assert cli_env_setup() == {}
    asked = engine_environment(3)
    assert (asked["OMP_WAIT_POLICY"], asked["OMP_NUM_THREADS"]) == ("ACTIVE", "3")
    assert not {"GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & asked.keys()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert engine_environment(3).items() >= WAITING.items() and not WAITING.keys() & os.environ.keys()
    assert cli_env_setup() == WAITING and WAITING.items() <= os.environ.items()


def test_a_config_needs_no_torch() -> None:
    code = (
        "import sys; from stage03_engine.arg_utils import EngineArgs;"
        "EngineArgs.from_kwargs(model='gpt2', load_format='dummy');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "meant"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_number_formats_have_two_names(name: str, meant: str) -> None:
    parser = FlexibleArgumentParser(prog="test")
    AsyncEngineArgs.add_cli_args(parser)
    args = parser.parse_args(["--model=gpt2", "--load-format=dummy", "--device=cpu", f"--dtype={name}"])
    config, settings = AsyncEngineArgs.from_cli_args(args, {}).create_engine_config()
    assert config.model_config.dtype == settings["dtype"].value == meant
    assert settings["dtype"].source == "command line"


@pytest.mark.parametrize(
    ("own", "capability", "chosen"),
    [
        ("float32", (9, 0), "bfloat16"), ("float32", (8, 0), "bfloat16"), ("float32", (7, 5), "float16"), ("float32", None, "bfloat16"),
        ("bfloat16", (8, 9), "bfloat16"), ("bfloat16", (7, 0), "float16"), ("bfloat16", None, "bfloat16"),
        ("float16", (9, 0), "float16"), ("float16", (7, 5), "float16"),
    ],
)  # fmt: skip
def test_auto_takes_16_bits_on_a_gpu(
    own: str, capability: tuple[int, int] | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_format, "gpu_capability", lambda: capability)
    shape = replace(EngineArgs.from_kwargs(**DUMMY).shape, torch_dtype=own)
    assert FastestFormat.detect({"dtype": "auto", "device": "cuda", "shape": shape})["dtype"][0] == chosen


def test_the_cpu_decides_about_threads_and_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "find_cores", lambda: Cores(16, 8))
    monkeypatch.setattr(number_format, "cpu_dtype", lambda shape: ("bfloat16", "the CPU has amx_bf16"))
    parser = FlexibleArgumentParser(prog="test")
    AsyncEngineArgs.add_cli_args(parser)
    words = ["--model=gpt2", "--load-format=dummy", "--device=cpu"]
    config, settings = AsyncEngineArgs.from_cli_args(parser.parse_args(words), {}).create_engine_config()
    assert (config.device_config.num_threads, config.model_config.dtype) == (8, "bfloat16")
    assert settings["num_threads"].origin == "detected (8 cores, 16 hardware threads)"
    assert settings["dtype"].origin == "detected (the CPU has amx_bf16)"
    exact = AsyncEngineArgs.from_cli_args(parser.parse_args([*words, "--dtype=float32"]), {}).create_engine_config()[0]
    assert exact.model_config.dtype == "float32"


def test_without_a_driver_nobody_knows_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(number_format.ctypes, "CDLL", no_library)
    assert number_format.gpu_capability() is None
