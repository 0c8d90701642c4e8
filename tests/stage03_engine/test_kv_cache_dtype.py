"""`--kv-cache-dtype`: more blocks in the same memory, nearly the same model, and tokens that depend on nothing but the request."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from patience import PATIENCE
from server_under_test import ServerProcess
from small_adapters import write_adapter
from small_gpt2 import first_layers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stage02_server.features.dry_run.memory import estimate_memory
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.kv_cache_dtype import accuracy
from stage03_engine.core.features.kv_cache_dtype.kv_cache_dtype import with_8bit_cache
from stage03_engine.core.features.kv_cache_dtype.manifest import AUTO, CHOICES, KVCacheDtypeFlags
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.params.pooling_params import PoolingParams
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.native import library
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS, SHORT
from stage04_kernels.paged_attention import torch_attention
from stagetrace import read_run

SMALL: dict[str, Any] = {
    "max_model_len": 96,
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "linear_backend": "torch",
}
COMPILES = library.problem() is None
PROMPTS = [list(range(5, 45)), list(range(5, 38)), [7], list(range(5, 20)) + [9] * 20, [8] * 12]
PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True, **how)
    for how in ({"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0, "logprobs": 1}, {"temperature": 0}, {"temperature": 0})
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(first_layers(tmp_path_factory.mktemp("kv8") / "model", 2))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two query heads to a key/value head, in heads of 12 numbers."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        max_position_embeddings=96, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED_FOLDER / "gpt2-tiny" / name).read_bytes())
    return str(folder)


def config_of(**settings: Any) -> Any:
    return EngineArgs.from_kwargs(**{"model": "gpt2-tiny"} | SMALL | settings)


# Memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [AUTO, *CHOICES])
def test_the_plan_is_what_is_allocated(name: str, dtype: str) -> None:
    """One layout decides the tensors, the number of blocks and the dry run."""
    config = config_of(kv_cache_dtype=name, dtype=dtype, attention_backend="torch")
    runner = ModelRunner(config, torch.device("cpu"))
    block_bytes = sum(cache[:, 0].nbytes for cache in runner.new_kv_caches(3, torch.device("cpu")))
    assert block_bytes == kv_block_bytes(config) == estimate_memory(config).per_token * 4
    if name != AUTO:
        full = kv_block_bytes(config_of(dtype=dtype))
        head_dim, has_scales = config.shape.head_dim, FORMATS[SHORT.get(name, name)].has_scales
        assert full / block_bytes == head_dim * (4 if dtype == "float32" else 2) / (head_dim + 4 * has_scales)
        assert full / block_bytes >= (3.7 if dtype == "float32" else 1.85)


@pytest.fixture(scope="module", params=["auto", "fp8", "int8"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, ServerProcess]]:
    flags = ["--kv-cache-memory-bytes", "20000000", "--max-model-len", "128", "--device", "cpu", "--dtype", "float32"]
    running = ServerProcess("gpt2-tiny", "--port", "0", *flags, "--kv-cache-dtype", request.param)
    running.wait_until_ready()
    yield request.param, running
    running.close()


@pytest.mark.slow(keep="int8")
def test_a_server_says_how_many_blocks_there_are(server: tuple[str, ServerProcess]) -> None:
    name, running = server
    body = {"model": "gpt2-tiny", "prompt": "To be, or", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(running.url + "/v1/completions", json=body, timeout=PATIENCE).json()
    assert answer["usage"]["completion_tokens"] == 8
    [line] = re.findall(
        r"^vllm:cache_config_info\{.*", httpx.get(running.url + "/metrics", timeout=PATIENCE).text, re.M
    )
    assert f'cache_dtype="{name}"' in line
    per_token = {"auto": 12288, "fp8": 3072, "int8": 3264}[name]  # 6 layers, keys and values, 4 heads of 64
    assert f'num_gpu_blocks="{20_000_000 // (16 * per_token)}"' in line


# Refusals


@pytest.mark.parametrize(
    "name", ["nvfp4", "float64", "fp8_inc", "fp8_ds_mla", "int4_per_token_head", "turboquant_4bit_nc", ""]
)
def test_what_is_not_built_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^kv_cache_dtype {name} is not supported: .*fp8_per_token_head$"):
        config_of(kv_cache_dtype=name)


def test_scales_begin_at_a_whole_float32(llama: str) -> None:
    config = config_of(model=llama)
    shape = replace(config.shape, head_dim=6)
    for block_size, name, possible in ((1, "int8", False), (2, "int8", True), (1, "fp8", True)):
        cache = replace(config.cache_config, kv_cache_dtype=name, block_size=block_size)
        changed = replace(config, cache_config=cache, model_config=replace(config.model_config, shape=shape))
        with (
            nullcontext()
            if possible
            else pytest.raises(ConfigError, match="^kv_cache_dtype int8 needs blocks whose scales")
        ):
            KVCacheDtypeFlags.check(changed)


def test_a_torch_without_the_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(kv_cache_dtype="fp8", attention_backend="torch")
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(
        ConfigError, match=r"^kv_cache_dtype fp8_e4m3 cannot be used: torch .* has no float8_e4m3fn on cpu$"
    ):
        ModelRunner(config, torch.device("cpu"))


def test_a_model_with_its_attention_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model whose layers call `self.attention`; Linear has none"):
        with_8bit_cache(torch.nn.Linear(2, 2), "torch", FORMATS["fp8_e4m3"])


# Tokens


def tokens_of(llm: LLM, prompts: list[list[int]] = PROMPTS, params: list[SamplingParams] = PARAMS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(model: str) -> dict[str, list[list[int]]]:
    """Format -> the tokens of each request, alone and without a prefix cache."""
    found = {}
    for name in ("int8", "fp8_e5m2"):
        with LLM(model, kv_cache_dtype=name, enable_prefix_caching=False, num_gpu_blocks_override=60, **SMALL) as llm:
            found[name] = [
                tokens_of(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
    return found


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "together": {"num_gpu_blocks_override": 120},
    "copies": {"num_gpu_blocks_override": 120, "attention_backend": "torch"},
    "eager": {"num_gpu_blocks_override": 120, "enforce_eager": True},
    "drafts": {"num_gpu_blocks_override": 120, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "chunks": {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    "recomputed": {"num_gpu_blocks_override": 27},
    "swapped": {"num_gpu_blocks_override": 27, "preemption_mode": "swap", "swap_space": 0.001},
    "two workers": {"num_gpu_blocks_override": 120, "tensor_parallel_size": 2},
    "two stages": {"num_gpu_blocks_override": 120, "pipeline_parallel_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ["int8", "fp8_e5m2"])
@pytest.mark.parametrize("how", CONFIGURATIONS)
@pytest.mark.slow(keep=("copies-int8", "chunks-fp8", "swapped-int8", "drafts-fp8"))
def test_company_chunks_and_history_change_no_token(
    how: str, name: str, model: str, alone: dict[str, list[list[int]]]
) -> None:
    if how.startswith("two") and name != "int8":
        pytest.skip("one format is enough for two processes")
    with LLM(model, kv_cache_dtype=name, **SMALL, **CONFIGURATIONS[how]) as llm:
        for turn in ("a cold prefix cache", "a warm one"):
            assert tokens_of(llm) == alone[name], turn
        if how in ("recomputed", "swapped"):
            assert llm.engine_core._core.scheduler.make_stats().num_preemptions  # type: ignore[attr-defined]


def test_logprobs_do_not_depend_on_the_batch_in_any_bit(model: str) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    settings = SMALL | {"batch_invariant": True, "kv_cache_dtype": "int8", "num_gpu_blocks_override": 120}
    with LLM(model, **settings) as llm:
        batch = llm.generate(PROMPTS, params)  # type: ignore[arg-type]
        for prompt, together in zip(PROMPTS, batch, strict=True):
            [single] = llm.generate([prompt], params)
            assert single.outputs[0].logprobs == together.outputs[0].logprobs


def test_a_folder_of_another_format_is_not_read(model: str, tmp_path: Path, alone: dict[str, list[list[int]]]) -> None:
    extra = {"shared_storage_path": str(tmp_path), "max_read_seconds": PATIENCE}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    settings = SMALL | {
        "kv_transfer_config": transfer,
        "prefix_caching_hash_seed": "one",
        "num_gpu_blocks_override": 120,
    }
    found = []
    for name in ("int8", "fp8", "fp8_e5m2", "auto", "int8"):
        with LLM(model, kv_cache_dtype=name, **settings) as llm:
            [output] = llm.generate([PROMPTS[0]], PARAMS[0])
            found.append(output.num_cached_tokens)
            if name in alone:
                assert list(output.outputs[0].token_ids) == alone[name][0]
    assert found == [0, 0, 0, 0, 36], "only blocks of the same format"


def test_adapters_have_a_cache_of_8_bits_too(model: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", Path(model), seed=1)
    params = [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, lora=lora) for lora in ("poet", None)]
    settings = SMALL | {"enable_lora": True, "lora_modules": (f"poet={adapter}",), "num_gpu_blocks_override": 120}
    with LLM(model, kv_cache_dtype="int8", **settings) as llm:
        together = tokens_of(llm, [PROMPTS[0]] * 2, params)
        assert together == [tokens_of(llm, [PROMPTS[0]], [each])[0] for each in params] and together[0] != together[1]


def test_a_function_of_ones_own_attends_to_a_copy(
    model: str, monkeypatch: pytest.MonkeyPatch, alone: dict[str, Any]
) -> None:
    seen = []

    def attend(query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, *more: Any) -> Tensor:
        seen.append((kv_cache.dtype, kv_cache.shape[2:]))
        return torch_attention(query, key, value, kv_cache, *more)

    monkeypatch.setattr(sys.modules[__name__], "attend", attend, raising=False)
    settings = SMALL | {"attention_backend": f"{__name__}:attend", "num_gpu_blocks_override": 60}
    with LLM(model, kv_cache_dtype="int8", **settings) as llm:
        assert tokens_of(llm) == alone["int8"]
    assert set(seen) == {(torch.float32, (4, 4, 64))}


# Accuracy


def test_what_it_costs(model: str) -> None:
    tokens = torch.tensor([(7 * i * i + i) % 300 for i in range(700)])
    sums = {name: each for name, (_, each) in accuracy.measure(model, tokens).items()}
    assert list(sums) == [AUTO, *FORMATS] and {each.tokens for each in sums.values()} == {699}
    loss = {name: each.divergence / each.tokens for name, each in sums.items()}
    assert loss[AUTO] == 0 < loss["int8_per_token_head"] < loss["fp8_per_token_head"] < 1e-3
    assert loss["int8_per_token_head"] < loss["fp8_e4m3"] < loss["fp8_e5m2"] < 3e-3


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be: that is the question. " * 40)
    assert accuracy.main(["--text", str(text), "--max-tokens", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["auto", "12288"] and len(lines) == 2 + len(FORMATS)
    text.write_text("a")
    assert accuracy.main(["--text", str(text)]) == 2
    assert capsys.readouterr().err.startswith("error: ") and accuracy.main(["--text", "/nowhere"]) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_heads_that_share_keys(name: str, llama: str) -> None:
    """The Llama family: keys are rotated before they are stored, and the logits are nearly those of the full cache."""
    tokens = torch.arange(5, 90)
    wanted, found = (accuracy.logits_of(accuracy.make_runner(llama, each), tokens) for each in (AUTO, name))
    assert 0 < (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_embeddings(model: str) -> None:
    vectors = []
    for name in (AUTO, "int8"):
        with LLM(model, kv_cache_dtype=name, runner="pooling", num_gpu_blocks_override=60, **SMALL) as llm:
            [output] = llm.encode([PROMPTS[0]], PoolingParams())
            vectors.append(torch.tensor(array("f", output.result["pooled"][0])))
    assert 0.9999 < torch.cosine_similarity(*vectors, dim=0) <= 1.0001 and not torch.equal(*vectors)


# Trace


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("native", marks=pytest.mark.skipif(not COMPILES, reason="no compiler"))]
)
def test_the_trace_tells_the_format_and_the_size(backend: str, model: str, tmp_path: Path) -> None:
    settings = SMALL | {"attention_backend": backend, "trace": str(tmp_path), "num_gpu_blocks_override": 60}
    with LLM(model, kv_cache_dtype="int8", **settings):
        pass
    run = read_run(tmp_path)
    [event], [allocated] = run.named("kv_cache.quantized"), run.named("kv_cache.allocated")
    path = {"torch": "copy", "native": "native"}[backend]
    assert event.args == {"format": "int8_per_token_head", "path": path, "block_bytes": allocated.args["bytes"] // 60}
