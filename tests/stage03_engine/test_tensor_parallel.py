"""A model in 2 and 4 slices against the same model in one piece: logits, tokens, memory, exchanges, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joined_ranks import Result, run_case, run_joined
from safetensors.torch import load_file, save_file

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.distributed.rank_config import own_slice
from stage03_engine.core.features.distributed.several_workers import all_ranks
from stage03_engine.core.features.distributed.sharded_weights import Split, cut, length_of
from stage03_engine.core.models.registry import model_class
from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import read_shape
from stage03_engine.model_path import BUNDLED_FOLDER
from stage04_kernels.backends.native import library

TOKENIZER = str(BUNDLED_FOLDER / "gpt2-tiny")
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 101, "n_positions": 64, "n_embd": 24,
    "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 40, "max_position_embeddings": 64,
    "eos_token_id": 210,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, own output matrix": GPT2 | {"tie_word_embeddings": False},
    "gpt2, scaled by layer": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "gpt2, not scaled": GPT2 | {"scale_attn_weights": False},
    "gpt2, relu": GPT2 | {"activation_function": "relu", "tie_word_embeddings": False},
    "gpt2, narrow MLP": GPT2 | {"n_inner": 4},
    "gpt2, three tokens": GPT2 | {"vocab_size": 3, "tie_word_embeddings": False},
    "gpt2, one token": GPT2 | {"vocab_size": 1},
    "gpt2, heads of 1": GPT2 | {"n_embd": 4},
    "gpt2, heads of 7": GPT2 | {"n_embd": 28},
    "gpt2, classes": GPT2 | {"architectures": ["GPT2ForSequenceClassification"], "num_labels": 3},
    "llama, 1 KV head": LLAMA | {"num_key_value_heads": 1},
    "llama, 2 KV heads": LLAMA,
    "llama, 4 KV heads": LLAMA | {"num_key_value_heads": 4},
    "llama, 8 KV heads": LLAMA | {"num_key_value_heads": 8},
    "llama, tied": LLAMA | {"tie_word_embeddings": True},
    "llama, biases": LLAMA | {"attention_bias": True},
    "llama, classes": LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
    "mistral": LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9},
    "qwen2, some layers sliding": LLAMA | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    },
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 20, "num_key_value_heads": 1},
    "qwen3, tied": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}  # fmt: skip
"""Name -> config.json."""


def checkpoint(folder: Path, config: dict[str, Any]) -> str:
    """Random weights, large enough that every part matters, under the names that Hugging Face stores, with what else lies in old files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_shape(folder)
    with torch.device("meta"):
        model = model_class(shape.architecture)(shape, "torch")
    generator, gpt2 = torch.Generator().manual_seed(6), shape.architecture.startswith("GPT2")
    tensors = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            noise = 0.3 * noise + (not name.endswith("bias"))
        elif not any(part in name for part in ("wte", "wpe", "embed_tokens", "lm_head")):
            noise *= shape.hidden_size**-0.5
        bare = name.startswith(("lm_head", "score"))
        tensors[name if bare else ("transformer." if gpt2 else "model.") + name] = noise
    if gpt2:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """A GPT-2 whose file does not fit its config.json."""
    checkpoint(folder, GPT2)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


C_FC, C_PROJ = "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_proj.weight"
SPOILT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a wider MLP": (lambda t: t.update({C_FC: torch.zeros(24, 192)}), "h.1.mlp.c_fc.weight has shape [24, 192]"),
    "other inputs": (lambda t: t.update({C_FC: torch.zeros(23, 96)}), "h.1.mlp.c_fc.weight has shape [23, "),
    "a vector": (lambda t: t.update({C_FC: torch.zeros(96)}), "h.1.mlp.c_fc.weight has shape [96]"),
    "one matrix less": (lambda t: t.pop(C_PROJ), "lacks 1 tensors: h.1.mlp.c_proj.weight"),
    "one too many": (lambda t: t.update({"transformer.h.1.q_proj.weight": torch.zeros(24, 24)}), "does not know"),
    "NaN": (lambda t: t[C_PROJ].__setitem__((95, 0), torch.nan), "NaN or infinity"),
}
"""Name -> (what is wrong with the file, what the error says); the NaN is in the last slice."""

TINY: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny, native": {"linear_backend": "native"},
    "tiny, torch": {"linear_backend": "torch", "attention_backend": "torch"},
    "tiny, onednn": {"linear_backend": "onednn"},
    "tiny, dummy": {"load_format": "dummy", "seed": 3},
    "tiny, bfloat16": {"dtype": "bfloat16"},
    "tiny, int8": {"quantization": "int8"},
    "tiny, int4": {"quantization": "int4"},
    "tiny, batch invariant": {"batch_invariant": True},
}
"""gpt2-tiny under settings that change what multiplies by the weights, or where they come from."""
if library.problem():
    del TINY["tiny, native"]
ROUGH = ("tiny, bfloat16", "tiny, int8", "tiny, int4")
IN_TWO_ONLY = {*TINY, *SPOILT} - {"tiny, torch"}
"""Cases that four ranks would not make harder."""
FOUR = pytest.mark.long
"""Four processes load torch: `test_the_slices_of_four_ranks` has in short what is peculiar to them."""

GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
DRAWN = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 10, "ignore_eos": True}
TIGHT = {
    "model": "gpt2-tiny", "max_model_len": 96, "block_size": 5, "num_gpu_blocks_override": 60, "max_num_seqs": 16,
    "max_num_batched_tokens": 48, "linear_backend": "torch",
}  # fmt: skip


def prompts() -> list[list[int]]:
    """64 of them, of which some begin alike."""
    rng = random.Random(1)
    stem = [rng.randrange(1, 2048) for _ in range(40)]
    return [
        stem[: rng.randrange(41)] + [rng.randrange(1, 2048) for _ in range(rng.randrange(1, 20))] for _ in range(64)
    ]


def all_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> case of `run_case`."""
    common = {"tokenizer": TOKENIZER, "block_size": 5}
    torch_alone = common | {"linear_backend": "torch"}
    cases: dict[str, dict[str, Any]] = {}
    for number, (name, config) in enumerate(MODELS.items()):
        model = checkpoint(folder / str(number), config)
        vocab = config["vocab_size"]
        tokens = [int(token) % vocab for token in torch.randperm(211, generator=torch.Generator().manual_seed(1))[:40]]
        cases[name] = {"do": "logits", "settings": {"model": model} | torch_alone, "tokens": tokens, "chunk": 13}
    for number, (name, (change, _)) in enumerate(SPOILT.items()):
        model = spoil(folder / f"spoilt-{number}", change)
        cases[name] = {"do": "load", "settings": {"model": model} | torch_alone}
    tokens = torch.randint(2048, (48,), generator=torch.Generator().manual_seed(2)).tolist()
    for name, settings in TINY.items():
        own = {"model": "gpt2-tiny"} | common | settings
        cases[name] = {"do": "logits", "settings": own, "tokens": tokens, "chunk": 20}
    cases["greedy"] = {"do": "generate", "settings": TIGHT, "prompts": prompts()[:24], "params": GREEDY}
    cases["drawn"] = {"do": "generate", "settings": TIGHT, "prompts": prompts()[:12], "params": DRAWN}
    return cases


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return all_cases(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(cases: dict[str, dict[str, Any]]) -> Callable[[str], Result]:
    """What one process computes, once."""
    results: dict[str, Result] = {}

    def result(name: str) -> Result:
        if name not in results:
            results[name] = run_case(cases[name])
        return results[name]

    return result


@pytest.fixture(scope="module")
def joined(
    cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[dict[str, Result]]]:
    """What each of 2 or of 4 ranks computes."""
    results: dict[int, list[dict[str, Result]]] = {}

    def result(tp_size: int) -> list[dict[str, Result]]:
        if tp_size not in results:
            chosen = {name: case for name, case in cases.items() if tp_size == 2 or name not in IN_TWO_ONLY}
            results[tp_size] = run_joined(tmp_path_factory.mktemp("ranks") / "run", tp_size, chosen)
        return results[tp_size]

    return result


Alone = Callable[[str], Result]
Joined = Callable[[int], list[dict[str, Result]]]


@pytest.mark.parametrize(
    ("name", "tp_size"),
    [(name, 2) for name in (*MODELS, *TINY) if name not in ROUGH]
    + [pytest.param(name, 4, marks=FOUR) for name in (*MODELS, "tiny, torch")],
)
def test_logits_are_those_of_one_process(name: str, tp_size: int, alone: Alone, joined: Joined) -> None:
    """On every rank, which all have the same bits: so they sample the same tokens."""
    expected = alone(name)["logits"]
    assert expected.std() > 0.02 or expected.shape[1] == 1, "the test is void with flat logits"
    found = [rank[name] for rank in joined(tp_size)]
    torch.testing.assert_close(found[0]["logits"], expected, atol=1e-4, rtol=0)
    assert all(torch.equal(other["logits"], found[0]["logits"]) for other in found)


@pytest.mark.parametrize("name", ROUGH)
def test_rougher_numbers_are_no_rougher_in_slices(name: str, alone: Alone, joined: Joined) -> None:
    """bfloat16 and int8 round each slice by itself: the result is another one, and about as near to float32."""
    exact = alone("tiny")["logits"]
    error = (alone(name)["logits"] - exact).square().mean().sqrt()
    assert error > 0, "the test is void if nothing is rounded"
    assert (joined(2)[0][name]["logits"] - exact).square().mean().sqrt() < 1.3 * error


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=FOUR)])
def test_weights_and_cache_are_divided(tp_size: int, alone: Alone, joined: Joined) -> None:
    """All but the position embeddings, norms and some biases."""
    whole = alone("tiny, torch")
    for rank in joined(tp_size):
        assert rank["tiny, torch"]["kv_bytes"] * tp_size == whole["kv_bytes"]
        assert rank["tiny, torch"]["weight_bytes"] < whole["weight_bytes"] * (1 / tp_size + 0.04)


@pytest.mark.parametrize(("name", "heads"), [("1 KV head", (1, 1)), ("2 KV heads", (1, 1)), ("4 KV heads", (2, 1))])
@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=FOUR)])
def test_a_rank_caches_its_own_kv_heads(name: str, heads: tuple[int, int], tp_size: int, joined: Joined) -> None:
    """One at least: where there are fewer heads than ranks, several ranks have the same."""
    assert joined(tp_size)[-1]["llama, " + name]["kv_heads"] == heads[tp_size == 4]


def test_the_slices_of_four_ranks(tmp_path: Path) -> None:
    """Two ranks share a KV head and have the query heads that read it; what is beyond the end of the vocabulary is zero."""
    model = checkpoint(tmp_path / "model", LLAMA | {"vocab_size": 5})
    config = EngineArgs.from_kwargs(model=model, tokenizer=TOKENIZER, tensor_parallel_size=4)
    rows = {
        along: torch.arange(1, 1 + length_of(along, config.shape))[:, None]
        for along in ("heads", "kv_heads", "vocabulary")
    }

    def slices(along: str) -> list[list[int]]:
        split = Split(0, along)
        return [cut(along, rows[along], split, config.shape, own).flatten().tolist() for own in all_ranks(config)]

    first, second = rows["kv_heads"].flatten().split(12)
    assert slices("kv_heads") == [first.tolist()] * 2 + [second.tolist()] * 2
    assert slices("heads") == [own.tolist() for own in rows["heads"].flatten().split(24)]
    assert slices("vocabulary") == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert own_slice(config.shape, config.shape, 4).num_kv_heads == 1


@pytest.mark.parametrize("name", ["gpt2", "llama, biases"])
def test_what_is_exchanged(name: str, alone: Alone, joined: Joined) -> None:
    """A step of three layers: two sums in each, one for the embedding, and the logits once."""
    assert joined(2)[0][name]["exchanges"] == [{"all_gather": 1, "all_reduce": 7}] * 4
    assert alone(name)["exchanges"] == [{}] * 4


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=FOUR)])
def test_tokens_are_those_of_one_process(tp_size: int, kind: str, alone: Alone, joined: Joined) -> None:
    """With chunks, a prefix cache, and blocks for a few requests only."""
    expected = alone(kind)
    assert len({token for tokens in expected["tokens"] for token in tokens}) > 20, (
        "the test is void if answers are dull"
    )
    for rank in joined(tp_size):
        assert rank[kind]["tokens"] == expected["tokens"]
        assert rank[kind] == expected, "every decision of the scheduler is the same"
    if kind == "greedy":
        assert expected["preemptions"] > 0 and expected["cached"] > 0, "the test is void if nothing was preempted"


@pytest.mark.parametrize("name", SPOILT)
def test_a_checkpoint_that_does_not_fit_is_refused(name: str, joined: Joined) -> None:
    """By the ranks that see it, in words that name the tensor."""
    errors = [rank[name].get("error", "") for rank in joined(2)]
    concerned = errors[-1:] if name == "NaN" else errors
    assert all(SPOILT[name][1] in error for error in concerned), errors


@pytest.mark.parametrize(
    ("config", "tp_size", "message"),
    [
        (GPT2, 3, "tensor_parallel_size = 3 does not divide the model's 4 attention heads; possible .*: 1, 2, 4$"),
        (GPT2 | {"n_inner": 6}, 4, "does not divide the model's intermediate size, 6; possible .*: 1, 2$"),
        (LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "neither divides the model's 3 KV heads"),
        (LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "nor is a multiple of them"),
    ],
)
def test_sizes_that_do_not_divide(config: dict[str, Any], tp_size: int, message: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", config)
    with pytest.raises(ConfigError, match=message):
        EngineArgs.from_kwargs(model=model, tokenizer=TOKENIZER, tensor_parallel_size=tp_size)
