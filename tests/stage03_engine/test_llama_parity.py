"""The Llama family against Hugging Face transformers: the same random weights, saved by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import stage03_engine.bundled
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.models.loader import get_model
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import AttentionMetadata

BUNDLED = Path(stage03_engine.bundled.__file__).parent / "gpt2-tiny"
CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": 210,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, tied, biases, own head_dim": (
        LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 12},
    ),
    "llama, linear": (
        LlamaConfig, LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}, "num_key_value_heads": 6},
    ),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 9, "num_key_value_heads": 3}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2, some layers sliding": (
        Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 20, "num_key_value_heads": 1}),
    "qwen3, tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "tie_word_embeddings": True}),
}  # fmt: skip


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """Random weights, large enough that every part matters and that two logits are never nearly equal."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(5)
    model = model_class(config_class(**(COMMON | own | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)  # norms around 1, biases around 0
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * 1.2 * parameter.shape[1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder with its checkpoint, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("model")
            make_model(family).save_pretrained(made[family])
        return made[family]

    return folder


def our_model(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[torch.nn.Module, Any]:
    config = EngineArgs.from_kwargs(model=str(folder), tokenizer=str(BUNDLED), device="cpu", **settings)
    return get_model(config, dtype, CPU), config.shape


def our_logits(folder: Path, tokens: list[int], block_size: int, chunk: int, **settings: Any) -> torch.Tensor:
    """Logits of every position, [num_tokens, vocab], in chunks, from blocks that lie out of order among NaN."""
    model, shape = our_model(folder, **settings)
    n = len(tokens)
    table = torch.randperm(-(-n // block_size), generator=torch.Generator().manual_seed(0)) + 1
    size = (2, len(table) + 1, block_size, shape.num_kv_heads, shape.head_dim)
    caches = [torch.full(size, torch.nan) for _ in range(shape.num_layers)]
    rows = []
    for start in range(0, n, chunk):
        positions = torch.arange(start, min(start + chunk, n))
        count, end = len(positions), int(positions[-1]) + 1
        slots = table[positions // block_size] * block_size + positions % block_size
        metadata = AttentionMetadata(
            torch.tensor([0, count], dtype=torch.int32), torch.tensor([end], dtype=torch.int32), table[None].int(),
            slots, [0, count], [end], count, end,
        )  # fmt: skip
        with torch.inference_mode():
            hidden = model(torch.tensor(tokens[start:end]), positions, caches, metadata)
            rows.append(model.compute_logits(hidden))
    return torch.cat(rows)


@pytest.mark.slow(keep=("-7-13", "mistral-3-1"))
@pytest.mark.parametrize(("block_size", "chunk"), [(5, 1000), (7, 13), (3, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(
    family: str, block_size: int, chunk: int, folders: Callable[[str], Path]
) -> None:
    folder = folders(family)
    reference = FAMILIES[family][1].from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(211, (70,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    assert expected.std() > 0.5, "the test is void with flat logits"
    difference = (our_logits(folder, tokens.tolist(), block_size, chunk) - expected).abs().max().item()
    assert difference <= 1e-4


def assert_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """Each token of the answer is the one that transformers finds most likely after all before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


TIGHT = {
    "max_model_len": 96, "block_size": 5, "num_gpu_blocks_override": 21, "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}  # fmt: skip
POLICIES: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "kv_cache_memory_bytes": 4_000_000},
    "preemption": TIGHT,
    "preemption, no prefix caching": TIGHT | {"enable_prefix_caching": False},
    "preemption by swapping": TIGHT | {"preemption_mode": "swap", "swap_space": 0.01},
}
SLIDING = ("mistral", "qwen2, some layers sliding")
"""Families that try every policy; swapping and recomputing without a cache know no more of the others than `preemption` shows."""
LENGTHS = (1, 13, 40, 27, 33)


@pytest.mark.slow(keep=("mistral", "llama3"))
@pytest.mark.parametrize("family", FAMILIES)
def test_32_greedy_tokens_are_transformers_own(family: str, folders: Callable[[str], Path]) -> None:
    """Prompts longer than the window of Mistral and Qwen2, in chunks, and with room for little more than one request."""
    folder = folders(family)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(210, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts[3][:20] = prompts[4][:20] = prompts[2][:20]  # a shared prefix, longer than any window
    reference = FAMILIES[family][1].from_pretrained(folder, dtype=torch.float32).eval()
    expected: list[list[int]] = []
    policies = POLICIES if family in SLIDING else {name: POLICIES[name] for name in ("chunks of 16", "preemption")}
    for name, policy in policies.items():
        with LLM(str(folder), tokenizer=str(BUNDLED), **policy) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
            preemptions = llm.engine_core._core.scheduler.stats.num_preemptions
        answers = [output.outputs[0].token_ids for output in outputs]
        if not expected:
            expected = answers
            for prompt, answer in zip(prompts, expected, strict=True):
                assert len(answer) == 32
                assert_greedy(reference, prompt, answer)
            assert len({token for tokens in expected for token in tokens}) > 12, "the test is void if answers are dull"
        assert answers == expected, name
        assert (preemptions > 0) == name.startswith("preemption"), "the test is void if nothing was preempted"


@pytest.mark.slow(keep=("bfloat16", "auto"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3, tied"])
def test_every_number_format_runs(family: str, dtype: str, folders: Callable[[str], Path]) -> None:
    """Half precision is near float32, and the model keeps that format throughout."""
    torch_dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    with LLM(str(folders(family)), tokenizer=str(BUNDLED), dtype=dtype, kv_cache_memory_bytes=4_000_000) as llm:
        runner = llm.engine_core._core.executor.worker.model_runner
        assert {p.dtype for p in runner.model.parameters()} == {runner.kv_caches[0].dtype} == {torch_dtype}
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        output = llm.generate([[1, 2, 3] * 8], params)[0].outputs[0]
    reference = FAMILIES[family][1].from_pretrained(folders(family), dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = reference(torch.tensor([[1, 2, 3] * 8])).logits[0, -1].log_softmax(-1)
    assert output.logprobs is not None
    ours = torch.tensor(output.logprobs[0].logprobs)
    torch.testing.assert_close(ours, logprobs[output.logprobs[0].token_ids], atol=0.15, rtol=0.05)


def reshard(folder: Path, target: Path) -> Path:
    """The same checkpoint in two files with an index, and a third file that the index does not name."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, target / file)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, target / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def test_a_sharded_checkpoint_is_the_same_model(folders: Callable[[str], Path], tmp_path: Path) -> None:
    whole, _ = our_model(folders("qwen3"))
    sharded, _ = our_model(reshard(folders("qwen3"), tmp_path))
    parameters = dict(sharded.named_parameters())
    assert len(parameters) > 30
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", lambda t: t.pop("lm_head.weight"), r"lacks 1 tensors: lm_head\.weight"),
        ("qwen2", lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"lacks 1 tensors: layers\.1\.self_attn\.k_pr"),
        ("llama", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}), r"not know: model\.lay"),
        ("qwen3", lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"norm\.weight has shape \[3\].*\[48\]"),
        ("llama", lambda t: t.update({"norm.weight": torch.zeros(48)}), "has .*norm.weight twice"),
        ("llama", lambda t: t.update({"model.norm.weight": torch.zeros(48).to(torch.int8)}), "quantized weights"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    family: str, change: Callable, message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = load_file(folders(family) / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders(family) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=message):
        our_model(tmp_path)


def test_what_old_checkpoints_hold_besides_weights_is_skipped(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Rotary tables, and a copy of the tied output matrix."""
    tensors = load_file(folders("qwen3, tied") / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = torch.zeros(211, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders("qwen3, tied") / "config.json").read_bytes())
    model, _ = our_model(tmp_path)
    with torch.inference_mode():
        assert model.compute_logits(torch.ones(1, 48)).abs().sum() > 0, "tied: the embedding makes the logits"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_the_files_own_memory(folders: Callable[[str], Path], tied: bool) -> None:
    """In the checkpoint's format no parameter is copied: each lies in a mapping of the file."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("mappings are read from /proc")
    folder = folders("qwen3, tied" if tied else "llama")
    model, _ = our_model(folder)
    spans = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in maps.read_text().splitlines()
        if line.endswith(str(folder / "model.safetensors"))
    ]
    for name, parameter in model.named_parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in spans), name


def test_every_end_of_text_stops_a_request(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Whichever of them comes; unless the request ignores them all."""
    folder = folders("llama")
    for file in folder.glob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    prompt = [[3, 1, 4, 1, 5]]
    settings = {"tokenizer": str(BUNDLED), "kv_cache_memory_bytes": 4_000_000}
    with LLM(str(folder), **settings) as llm:
        free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    for place in (2, 6):
        chosen = free.token_ids[place]
        first = free.token_ids.index(chosen)
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [200, chosen, 201]}))
        with LLM(str(tmp_path), **settings) as llm:
            params = SamplingParams(temperature=0, max_tokens=12)
            stopped = llm.generate(prompt, params)[0].outputs[0]
            ignored = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
        assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
        assert ignored.token_ids == free.token_ids
