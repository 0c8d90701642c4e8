"""`cudagraph_mode` and its sizes: what each means, what cannot be combined, and what a start says that it is going to record."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.compilation import config_json
from stage03_engine.core.features.cuda_graphs.modes import KEYS, MODES, OF_LEVEL, graphs_of, piece_sizes
from stage03_engine.core.features.cuda_graphs.plan import Plan
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM


def config_of(**settings: Any) -> VllmConfig:
    return EngineArgs.from_kwargs(model="gpt2-tiny", **{"device": "cuda"} | settings)


def plan_of(**settings: Any) -> Plan:
    return Plan.of(config_of(**settings))


def recorded(plan: Plan) -> tuple[bool, bool]:
    """Decode steps whole? Others in pieces?"""
    return bool(plan.full), bool(plan.pieces)


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("NONE", (False, False)), ("PIECEWISE", (False, True)), ("FULL", (True, True)), ("FULL_DECODE_ONLY", (True, False)),
        ("FULL_AND_PIECEWISE", (True, True)), ("full_and_piecewise", (True, True)), (None, (True, False)),
    ],
)  # fmt: skip
def test_what_a_mode_records(mode: str | None, what: tuple[bool, bool]) -> None:
    plan = plan_of(compilation_config={"cudagraph_mode": mode})
    assert recorded(plan) == what
    assert set(MODES) >= {plan.mode} and plan.mode != "FULL"
    installed = any(
        "CudaGraphHook" in name for name in config_of(compilation_config={"cudagraph_mode": mode}).hooks("runner")
    )
    assert installed == any(what)


@pytest.mark.parametrize("level", [None, 0, 1, 2, 3])
def test_what_a_level_records_on_a_gpu(level: int | None) -> None:
    config = config_of(optimization_level=level)
    expected = "FULL_DECODE_ONLY" if level is None else OF_LEVEL[level]
    assert Plan.of(config).mode == expected and config.compilation_config.mode == (3 if level else 0)
    assert recorded(Plan.of(config)) == {
        "NONE": (False, False),
        "PIECEWISE": (False, True),
        "FULL_DECODE_ONLY": (True, False),
    }.get(expected, (True, True))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_level_changes_nothing_on_a_cpu(level: int) -> None:
    plain, asked = config_of(device="cpu"), config_of(device="cpu", optimization_level=level)
    assert asked.hooks("runner") == plain.hooks("runner") and asked.compilation_config.mode == 0


def test_a_level_takes_what_it_can_have_and_a_mode_says_what_it_cannot() -> None:
    assert recorded(plan_of(optimization_level=2, attention_backend="torch")) == (False, True)
    assert recorded(plan_of(optimization_level=2, compilation_config={"mode": 1})) == (True, False)
    assert recorded(plan_of(optimization_level=2, enforce_eager=True)) == (False, False)
    assert plan_of(optimization_level=0, compilation_config={"cudagraph_mode": "PIECEWISE"}).mode == "PIECEWISE"
    assert recorded(plan_of(optimization_level=1, compilation_config={"mode": 0}, runner="pooling")) == (False, False)
    tiles: dict[str, Any] = {"batch_invariant": True, "linear_backend": "torch"}
    assert recorded(plan_of(optimization_level=1, compilation_config={"mode": 0}, **tiles)) == (False, False)


CONFLICTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("FULL_DECODE_ONLY", {}, {"attention_backend": "torch"}, "attention_backend torch: only triton records decode steps whole"),
    ("PIECEWISE", {"mode": 1}, {}, "mode 1: where torch.compile breaks its graphs"),
    ("PIECEWISE", {}, {"tensor_parallel_size": 2}, "several workers"),
    ("PIECEWISE", {}, {"trace_layers": True}, "trace_layers: a graph has no layers"),
    ("PIECEWISE", {}, {"runner": "pooling"}, "this model: it does not write text"),
    ("PIECEWISE", {"cudagraph_simulate": True}, {"device": "cpu", "batch_invariant": True}, "batch_invariant"),
    ("FULL_DECODE_ONLY", {"cudagraph_simulate": True}, {"device": "cpu"}, "only triton-interpret records decode steps whole; PIECEWISE works with any"),
    ("PIECEWISE", {"cudagraph_simulate": True}, {"device": "cpu", "attention_backend": "native"}, "attention_backend native: a simulation sees"),
    ("PIECEWISE", {"cudagraph_simulate": True}, {"device": "cpu", "linear_backend": "native"}, "linear_backend"),
    ("PIECEWISE", {"cudagraph_simulate": True}, {"device": "cpu", "quantization": "int8"}, "quantization"),
    ("PIECEWISE", {"cudagraph_simulate": True}, {"device": "cpu", "enable_sleep_mode": True}, "enable_sleep_mode"),
    ("PIECEWISE", {"cudagraph_simulate": True, "mode": 3}, {"device": "cpu"}, "backend inductor: a simulation does not see its loops"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "more", "settings", "about"), CONFLICTS, ids=lambda each: str(each)[:40])
def test_what_cannot_be_combined_is_one_line(
    mode: str, more: dict[str, Any], settings: dict[str, Any], about: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(compilation_config={"cudagraph_mode": mode} | more, **settings)
    assert about in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "device", "about"),
    [
        ({"cudagraph_mode": "ALL"}, "cuda", "cudagraph_mode must be one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE, not 'ALL'"),
        ({"cudagraph_mode": 2}, "cuda", "cudagraph_mode must"), ({"cudagraph_mode": []}, "cpu", "cudagraph_mode must"),
        ({"cudagraph_simulate": True}, "cuda", "is for a CPU"), ({"cudagraph_simulate": 1}, "cpu", "true or false"), ({"cudagraph_simulate": {}}, "cpu", "true or false"),
        ({"cudagraph_capture_sizes": []}, "cuda", "a list"), ({"cudagraph_capture_sizes": 4}, "cuda", "a list"), ({"cudagraph_capture_sizes": [True]}, "cuda", "a list"),
        ({"cudagraph_capture_sizes": [0]}, "cuda", "a list"), ({"cudagraph_capture_sizes": [1] * 600}, "cuda", "up to 512"), ({"cudagraph_capture_sizes": [65537]}, "cuda", "65536"),
        ({"max_cudagraph_capture_size": 0}, "cuda", "a number of tokens"), ({"max_cudagraph_capture_size": "8"}, "cuda", "a number of tokens"),
        ({"cudagraph_capture_sizes": [1, 8], "max_cudagraph_capture_size": 16}, "cuda", "must be the largest of cudagraph_capture_sizes, 8, not 16"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: dict[str, Any], device: str, about: str) -> None:
    with pytest.raises(ConfigError) as error:
        graphs_of(given, None, device)
    assert about in str(error.value) and len(str(error.value)) < 600


def test_sizes_are_those_of_vllm() -> None:
    assert piece_sizes(4, 2048) == [1, 2, 4, 8]
    assert (
        piece_sizes(256, 2048) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
        and len(piece_sizes(256, 2048)) == 51
    )
    assert piece_sizes(256, 100)[-1] == 96 and piece_sizes(256, 8192, None, 1024)[-1] == 1024
    given = plan_of(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [100, 16, 2, 2, 8]},
    )
    assert (given.full, given.pieces) == ([2, 8], [2, 8, 16])
    largest = plan_of(
        max_num_seqs=32, compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE", "max_cudagraph_capture_size": 8}
    )
    assert (largest.full, largest.pieces) == ([1, 2, 4, 8], [1, 2, 4, 8])
    assert plan_of(max_num_seqs=2, compilation_config={"cudagraph_capture_sizes": [8]}).num_graphs == 0, (
        "no batch is as large"
    )


def test_hooks_come_after_what_they_record() -> None:
    names = [name.rpartition(":")[2] for name in config_of(optimization_level=2).hooks("runner")]
    assert names.index("CompiledModelHook") < names.index("CudaGraphHook")


@pytest.mark.parametrize("mode", [*MODES, "null"])
def test_a_start_script_with_a_mode_goes_on_without_a_gpu(
    mode: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = mode if mode == "null" else f'"{mode}"'
    line = f"""serve gpt2-tiny --device cpu --dry-run -cc '{{"cudagraph_mode": {given}}}'"""
    assert main(shlex.split(line)) == 0
    assert "CUDA graphs" not in capsys.readouterr().out
    said = [line for line in caplog.messages if "has no effect on a CPU" in line]
    assert len(said) == (mode not in ("NONE", "null"))


def test_none_switches_recordings_on_a_cpu_off_as_well() -> None:
    config = config_of(device="cpu", compilation_config={"cudagraph_mode": "NONE"})
    assert not any("cuda_graphs" in name for name in config.hooks("runner"))


def test_a_dry_run_says_what_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt2-tiny has 6 layers, so a mixed step has 7 pieces."""
    layers = config_of(device="cpu").shape.num_layers
    for mode, said in (
        ("PIECEWISE", f"{3 * (layers + 1)} graphs: mixed steps of 3 sizes up to 8 tokens in {layers + 1} pieces each"),
        ("FULL_AND_PIECEWISE", f"{3 * (layers + 1) + 2} graphs: mixed steps"),
        ("FULL_DECODE_ONLY", "2 graphs: decode steps of 2 sizes up to 4 requests, with the sampler"),
    ):
        given = f'{{"cudagraph_simulate": true, "cudagraph_mode": "{mode}", "cudagraph_capture_sizes": [1, 4, 8]}}'
        line = [
            "serve",
            "gpt2-tiny",
            "--device",
            "cpu",
            "--max-num-seqs",
            "4",
            "--attention-backend",
            "triton-interpret",
            "--dry-run",
            "-cc",
            given,
        ]
        assert main(line) == 0
        [row] = [row for row in capsys.readouterr().out.splitlines() if row.startswith("  CUDA graphs")]
        assert said in row and mode in row and "runs of the model before the first request" in row


@pytest.mark.parametrize("key", KEYS)
def test_without_the_room_its_keys_are_refused_in_one_line(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_json, "is_there", lambda module: False)
    value = {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [1],
        "max_cudagraph_capture_size": 8,
        "cudagraph_simulate": True,
    }[key]
    with pytest.raises(ConfigError, match=f"^compilation_config: {key} needs CUDA graphs, which are not here: "):
        config_of(compilation_config={key: value})
    assert config_of(compilation_config={"mode": 3, "cudagraph_mode": "NONE"}).compilation_config.mode == 3


def test_the_compilers_room_names_all_keys() -> None:
    assert config_json.OF_GRAPHS == KEYS


def test_a_dry_run_expects_what_the_last_start_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """For these sizes; with others nobody knows. The log says it before, and what it took after."""

    def predicted(sizes: str) -> str:
        given = f'{{"cudagraph_simulate": true, "cudagraph_capture_sizes": {sizes}, "cache_dir": "{tmp_path}"}}'
        assert main(["serve", "gpt2-tiny", "--device", "cpu", "--dry-run", "-cc", given]) == 0
        [row] = [row for row in capsys.readouterr().out.splitlines() if row.startswith("  CUDA graphs")]
        return row

    assert "time unknown" in predicted("[1, 2]")
    caplog.set_level("INFO")
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 64, "skip_tokenizer_init": True}
    asked = {"cudagraph_simulate": True, "cudagraph_capture_sizes": [1, 2], "cache_dir": str(tmp_path)}
    with LLM("gpt2-tiny", device="cpu", **settings, compilation_config=asked):
        pass
    [before] = [line for line in caplog.messages if line.startswith("CUDA graphs: ")]
    [after] = [line for line in caplog.messages if line.startswith("Recorded ")]
    assert "time unknown" in before and "CUDA graphs (piecewise, sizes up to 2) in " in after
    [noted] = tmp_path.glob("graphs-*.json")
    took = json.loads(noted.read_text())["last"]
    assert f"about {took} s, as the last start took" in predicted("[1, 2]")
    assert "time unknown" in predicted("[1, 4]")
