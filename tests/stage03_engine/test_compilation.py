"""--compilation-config: the model as torch.compile makes it answers with the same tokens, and no request waits for a compilation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from drafting import small_llama
from safetensors.torch import load_file
from small_gpt2 import first_layers
from torch._dynamo.utils import counters

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.compilation.config_json import MODES, WITHOUT_MEANING, compilation_of
from stage03_engine.core.features.compilation.measured import remember
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

NUM_LAYERS = 1  # of the GPT-2
SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
}  # fmt: skip
PROMPTS = [[7], [7, 8, 9], list(range(5, 45)), [50] * 33, list(range(5, 40))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True, n=2),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "as it starts": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "preempted": {"num_gpu_blocks_override": 14, "block_size": 8},
    "swapped": {"num_gpu_blocks_override": 14, "block_size": 8, "swap_space": 1, "preemption_mode": "swap"},
    "no prefix cache": {"enable_prefix_caching": False},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "a model that drafts": {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}},
    "offloaded": {"kv_offloading_size": 0.01},
    "8-bit cache": {"kv_cache_dtype": "int8"},
    "reference attention": {"attention_backend": "reference"},
    "falls asleep": {"enable_sleep_mode": True},
    "learns": {"enable_weight_updates": True},
}  # fmt: skip
COMPILED = [(name, "VLLM_COMPILE", "eager") for name in SETTINGS]
COMPILED += [(name, "STOCK_TORCH_COMPILE", "eager") for name in ("as it starts", "chunks", "falls asleep")]
COMPILED += [("chunks", mode, "aot_eager") for mode in MODES if mode != "NONE"]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compiled") / str(request.param)
    if request.param == "gpt2":
        return first_layers(folder, NUM_LAYERS)
    small_llama(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """torch counts, and keeps what it compiled, for the process."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def answers(llm: LLM) -> list[Any]:
    asked = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


@cache
def plain(model: str, kv_cache_dtype: str = "auto") -> list[Any]:
    with LLM(model, **SMALL, attention_backend="torch", linear_backend="torch", kv_cache_dtype=kv_cache_dtype) as llm:
        return answers(llm)


@pytest.mark.parametrize(("name", "mode", "backend"), COMPILED)
@pytest.mark.slow(keep=("gpt2-learns-", "llama-chunks-VLLM_COMPILE-eager"))
def test_the_tokens_are_the_same(model: str, name: str, mode: str, backend: str) -> None:
    settings = SETTINGS[name]
    if name == "a model that drafts" and "gpt2" not in model:
        pytest.skip("another vocabulary")
    expected = plain(model, settings.get("kv_cache_dtype", "auto"))
    with LLM(model, **SMALL | settings, compilation_config={"mode": mode, "backend": backend}) as llm:
        before = counters["stats"]["unique_graphs"]
        assert answers(llm) == expected
        assert counters["stats"]["unique_graphs"] == before
        if "enable_sleep_mode" in settings:
            llm.sleep(2)
            llm.wake_up()
            assert answers(llm) == expected
        if "enable_weight_updates" in settings:  # others, then these again
            weights = load_file(Path(model) / "model.safetensors")
            llm.update_weights({name: tensor * 1.5 for name, tensor in weights.items()}.items())
            assert answers(llm) != expected
            llm.update_weights(weights.items())
            assert answers(llm) == expected


@pytest.mark.parametrize("name", [name for name in MODES if name != "NONE"])
@pytest.mark.slow(keep="gpt2-STOCK")
def test_no_request_waits_for_a_compilation(model: str, name: str, tmp_path: Path) -> None:
    """And what is said to have been made is what was made: one graph for a token and one for more, or such a pair between any two layers."""
    compilation = {"mode": name, "backend": "eager"}
    with LLM(model, **SMALL, compilation_config=compilation, trace=str(tmp_path)) as llm:
        before = counters["stats"]["unique_graphs"]
        assert answers(llm) == plain(model)
        assert counters["stats"]["unique_graphs"] == before
    [event] = [event for event in read_run(tmp_path).events if event.name == "model.compiled"]
    assert event.args["graphs"] == before
    if name == "VLLM_COMPILE":
        assert (event.args["graphs"], event.args["breaks"]) == (2, 0)
    else:
        assert event.args["graphs"] > NUM_LAYERS and event.args["breaks"] > 0


@pytest.mark.long
def test_inductor_answers_with_the_same_tokens(model: str, tmp_path: Path) -> None:
    """What it wrote to its folder is found by the next start."""
    for _ in range(2):
        torch._dynamo.reset()
        with LLM(model, **SMALL, compilation_config={"mode": 3, "cache_dir": str(tmp_path / "graphs")}) as llm:
            assert answers(llm) == plain(model)
    assert any((tmp_path / "graphs").rglob("*"))


@pytest.mark.parametrize(
    ("given", "level", "device", "mode"),
    [
        (None, 0, "cuda", 0), (None, 1, "cuda", 3), (None, 3, "cuda", 3), (None, 3, "cpu", 0), ({"level": 3}, None, "cpu", 0),
        ({"level": 2}, None, "cuda", 3), ({"mode": 3}, 0, "cpu", 3), ({"mode": "none"}, 3, "cuda", 0), ({"mode": 1}, None, "cpu", 1),
        ({}, None, "cuda", 0), ({"cudagraph_mode": "FULL"}, None, "cuda", 0),
    ],
)  # fmt: skip
def test_levels_and_modes(given: dict[str, Any] | None, level: int | None, device: str, mode: int) -> None:
    assert compilation_of(given, level, device)["mode"] == mode


@pytest.mark.parametrize(
    ("given", "level", "about"),
    [
        ({"mode": 2}, None, "mode must be one of 0 (NONE), 1"), ({"mode": True}, None, "mode must"), ({"mode": []}, None, "mode must"), (None, 4, "0 to 3"),
        ({"level": "3"}, None, "0 to 3"), ({"backend": "x"}, None, "inductor, eager, aot_eager"), ({"backend": 1}, None, "backend"),
        ({"cache_dir": ""}, None, "cache_dir"), ({"cache_dir": 5}, None, "cache_dir"), ({"modes": 3}, None, "modes"), ({"mode": "x" * 9000}, None, "x" * 200),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: dict[str, Any] | None, level: int | None, about: str) -> None:
    with pytest.raises(ConfigError) as error:
        compilation_of(given, level, "cpu")
    assert about in str(error.value) and len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "line",
    [
        "-O3",
        "-O 0",
        "-O1",
        "-cc '{\"level\": 3}'",
        "-cc '{\"mode\": 3}'",
        *(f"-cc '{{\"{key}\": null}}'" for key in WITHOUT_MEANING),
    ],
)
def test_start_lines_of_vllm_go_on(line: str) -> None:
    assert main(["serve", "gpt2-tiny", "--dry-run", *shlex.split(line)]) == 0


REFUSED: dict[str, Any] = {
    "attention_backend": "native", "linear_backend": "native", "quantization": "int8", "batch_invariant": True, "trace_layers": True,
    "enable_prompt_embeds": True, "enable_lora": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("setting", REFUSED)
def test_what_it_cannot_look_into_is_refused_in_one_line(setting: str) -> None:
    with pytest.raises(ConfigError, match="compilation_config") as error:
        LLM("gpt2-tiny", **SMALL, compilation_config={"mode": 3, "backend": "eager"}, **{setting: REFUSED[setting]})
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (
        "/proc/graphs",
        str(tmp_path / "file"),
        str(tmp_path / "file" / "below"),
        str(tmp_path / ("x" * 300)),
    ):
        with pytest.raises(ConfigError, match="cannot write to cache_dir") as error:
            LLM(model, **SMALL, compilation_config={"mode": 3, "backend": "eager", "cache_dir": folder})
        assert "\n" not in str(error.value)


def predicted(capsys: pytest.CaptureFixture[str], model: str, folder: Path, *more: str) -> str:
    """What `--dry-run` says of torch.compile."""
    words = ["serve", model, "--device", "cpu", "--skip-tokenizer-init", "--dry-run", *more]
    given = {"mode": 3, "backend": "eager", "cache_dir": str(folder)}
    assert main([*words, "--compilation-config", msgspec.json.encode(given).decode()]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  torch.compile ")]
    return line


def test_a_dry_run_expects_what_was_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this number format, and if the file can be read."""
    given = {"mode": 3, "backend": "eager", "cache_dir": str(tmp_path)}
    config = EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL, compilation_config=given)
    asked = (capsys, "gpt2-tiny", tmp_path, "--max-model-len", "96", "--dtype")
    assert "time unknown" in predicted(*asked, "float32")
    for seconds in (2.34, 1.26):
        remember(config, seconds, 2)
    line = predicted(*asked, "float32")
    assert "2 graphs of the whole step by eager" in line and "the first one 2.3 s" in line
    assert "about 1.3 s, as the last start took" in line and "time unknown" in predicted(*asked, "bfloat16")
    [noted] = tmp_path.iterdir()
    noted.write_text('{"first": "soon"}')
    assert "time unknown" in predicted(*asked, "float32")


@pytest.mark.slow
def test_a_start_notes_what_it_took(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    took = []
    caplog.set_level("INFO")
    for number in range(2):
        torch._dynamo.reset()
        config = {"mode": 3, "backend": "eager", "cache_dir": str(tmp_path / "graphs")}
        with LLM(model, **SMALL, compilation_config=config, trace=str(tmp_path / str(number))):
            pass
        [event] = read_run(tmp_path / str(number)).named("model.compiled")
        took.append(round(event.args["seconds"], 1))
    expected = [line for line in caplog.messages if line.startswith("torch.compile: 2 graphs")]
    assert "time unknown" in expected[0] and f"about {took[0]} s, as the last start took" in expected[1]
    line = predicted(capsys, model, tmp_path / "graphs", "--dtype", "float32", "--max-model-len", "96")
    assert f"about {took[1]} s, as the last start took" in line
