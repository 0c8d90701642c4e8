"""The GPT-2 written here against Hugging Face transformers on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2CLS

import stage03_engine.bundled
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.models.loader import get_model
from stage03_engine.llm import LLM
from stage03_engine.outputs import RequestOutput
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.backends.native import library
from stage04_kernels.sampler import SamplingMetadata, sample

NATIVE = () if library.problem() else ("native",)
BUNDLED = Path(stage03_engine.bundled.__file__).parent / "gpt2-tiny"
PROMPTS = [
    "To be, or",
    "ROMEO:\nWhat",
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n" * 3,
    "K",
]


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of an unusual shape with random weights large enough that every part matters, saved by transformers itself."""
    folder = tmp_path_factory.mktemp("random-gpt2")
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=301, n_positions=96, n_embd=60, n_layer=3, n_head=5, n_inner=100)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def hf_model(folder: Path) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()


def our_logits(folder: Path, tokens: list[int], backend: str = "auto") -> torch.Tensor:
    """Logits of every position, [num_tokens, vocab], through the paged path: one request whose blocks lie out of order."""
    how = {"tokenizer": str(BUNDLED), "device": "cpu", "attention_backend": backend}
    config = EngineArgs.from_kwargs(model=str(folder), **how)
    model = get_model(config, torch.float32, torch.device("cpu"))
    shape, block_size, n = config.shape, 4, len(tokens)
    table = torch.randperm(-(-n // block_size), generator=torch.Generator().manual_seed(0)) + 1
    positions = torch.arange(n)
    slots = table[positions // block_size] * block_size + positions % block_size
    caches = [
        torch.full((2, len(table) + 1, block_size, shape.num_kv_heads, shape.head_dim), torch.nan)
        for _ in range(shape.num_layers)
    ]
    metadata = AttentionMetadata(
        torch.tensor([0, n], dtype=torch.int32), torch.tensor([n], dtype=torch.int32), table[None].int(), slots,
        [0, n], [n], n, n,
    )  # fmt: skip
    with torch.inference_mode():
        return model.compute_logits(model(torch.tensor(tokens), positions, caches, metadata))


@pytest.mark.parametrize("which", ["bundled", "random"])
def test_logits_agree_with_transformers(which: str, random_folder: Path) -> None:
    folder = BUNDLED if which == "bundled" else random_folder
    reference = hf_model(folder)
    generator = torch.Generator().manual_seed(1)
    length = reference.config.n_positions
    tokens = torch.randint(reference.config.vocab_size, (length,), generator=generator)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    difference = (our_logits(folder, tokens.tolist()) - expected).abs().max().item()
    assert difference <= 1e-4


RELATIVES: dict[str, dict[str, Any]] = {
    "own output matrix": {"tie_word_embeddings": False},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "not scaled": {"scale_attn_weights": False},
    "scaled by layer alone": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "upcast": {
        "reorder_and_upcast_attn": True,
        "scale_attn_by_inverse_layer_idx": True,
        "attn_implementation": "eager",
    },
    "narrow MLP": {"n_inner": 7},
    "three tokens": {"vocab_size": 3, "tie_word_embeddings": False},
    "one token": {"vocab_size": 1},
    "heads of 1": {"n_embd": 3, "n_head": 3},
    "heads of 7": {"n_embd": 21, "n_head": 3},
    "heads of 80": {"n_embd": 160, "n_head": 2},
    "one head of 256": {"n_embd": 256, "n_head": 1},
    "one head of 300": {"n_embd": 300, "n_head": 1},
    "all at once": {
        "tie_word_embeddings": False,
        "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "relu2",
    },
}
"""What else transformers reads as GPT-2."""
ACTIVATIONS = {name: {"activation_function": name} for name in ACT2CLS if name not in ("prelu", "xielu")}


def relative(folder: Path, **changes: Any) -> GPT2LMHeadModel:
    """A small GPT-2 with random weights large enough that every part matters, which transformers saved in `folder`."""
    torch.manual_seed(4)
    small = {"vocab_size": 101, "n_positions": 32, "n_embd": 24, "n_layer": 3, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**small | {"bos_token_id": 0, "eos_token_id": 0} | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


ATTENDS = ("scaled by layer", "scaled by layer alone", "heads of 1", "heads of 7", "heads of 80", "one head of 300")


@pytest.mark.slow(keep=("torch", "native", "heads of 7-", "layer alone-reference"))
@pytest.mark.parametrize(
    ("which", "backend"),
    [(which, "torch") for which in RELATIVES]
    + [(which, backend) for which in ATTENDS for backend in (*NATIVE, "triton-interpret", "reference")],
)
def test_every_relative_of_gpt2_agrees_with_transformers(which: str, backend: str, tmp_path: Path) -> None:
    reference = relative(tmp_path, **RELATIVES[which])
    tokens = torch.randint(reference.config.vocab_size, (20,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    assert expected.std() > 0.1 or expected.shape[1] == 1
    torch.testing.assert_close(our_logits(tmp_path, tokens.tolist(), backend), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    reference = relative(tmp_path, **ACTIVATIONS[name])
    tokens = list(range(20))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(our_logits(tmp_path, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow(keep=("torch", "native"))
@pytest.mark.parametrize(
    ("which", "backend"),
    [("all at once", "torch"), *(("all at once", backend) for backend in NATIVE), ("one token", "torch"), ("three tokens", "torch"),
     ("three tokens", "triton-interpret")],
)  # fmt: skip
def test_a_relative_writes_what_transformers_writes(which: str, backend: str, tmp_path: Path) -> None:
    """Through the whole engine, in chunks and beside others; a sampled answer stays within the vocabulary."""
    model = relative(tmp_path, **RELATIVES[which])
    vocab_size = model.config.vocab_size
    prompt = [token % vocab_size for token in range(2, 8)]
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=4,
        pad_token_id=0,
        eos_token_id=None,
    )[0, len(prompt) :].tolist()
    how = {"attention_backend": backend, "max_num_batched_tokens": 4, "max_num_seqs": 3, "num_gpu_blocks_override": 20}
    with LLM(str(tmp_path), tokenizer=str(BUNDLED), device="cpu", **how) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        drawn = SamplingParams(
            temperature=1, top_k=2, top_p=0.9, min_p=0.01, seed=1, logprobs=5, max_tokens=4, ignore_eos=True
        )
        outputs = llm.generate([prompt, prompt, prompt], [greedy, drawn, greedy])
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == [expected, expected]
    assert len(outputs[1].outputs[0].token_ids) == 4 and set(outputs[1].outputs[0].token_ids) <= set(range(vocab_size))


@pytest.fixture(scope="module")
def bundled() -> GPT2LMHeadModel:
    return hf_model(BUNDLED)


def assert_greedy(model: GPT2LMHeadModel, outputs: list[RequestOutput]) -> None:
    """Each of the 64 tokens is the one that transformers finds most likely after all before it, without a cache."""
    assert len(outputs) == len(PROMPTS)
    for output in outputs:
        answer = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*output.prompt_token_ids, *answer]])).logits[0]
        assert len(answer) == 64 and logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == answer


POLICIES = {
    "unlimited": {},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "chunked prefill off": {"enable_chunked_prefill": False},
    "one at a time": {"max_num_seqs": 1},
    "block size 1": {"block_size": 1},
    "oracle attention": {"attention_backend": "reference"},
}


@pytest.mark.slow(keep=("chunks of 16", "block size 1"))
@pytest.mark.parametrize("policy", POLICIES)
def test_64_greedy_tokens_are_transformers_own(policy: str, bundled: GPT2LMHeadModel) -> None:
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000, **POLICIES[policy]) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert_greedy(bundled, outputs)


@pytest.mark.slow(keep="16")
@pytest.mark.parametrize("budget", [16, 2048])
def test_greedy_tokens_survive_preemption(budget: int, bundled: GPT2LMHeadModel) -> None:
    """Room for little more than one request: the others are preempted again and again, and nobody can tell."""
    tight = {"max_model_len": 160, "num_gpu_blocks_override": 12, "max_num_seqs": 8, "max_num_batched_tokens": budget}
    with LLM("gpt2-tiny", **tight) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        assert llm.engine_core._core.scheduler.stats.num_preemptions > 0, "the test is void if nothing was preempted"
        check_invariants(llm.engine_core._core.scheduler)
    assert_greedy(bundled, outputs)


def test_logprobs_are_those_of_transformers(bundled: GPT2LMHeadModel) -> None:
    with LLM("gpt2-tiny", num_gpu_blocks_override=40) as llm:
        output = llm.generate("To be, or", SamplingParams(temperature=0.9, seed=5, max_tokens=12, logprobs=3))[0]
    completion, tokens = output.outputs[0], output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        reference = bundled(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert completion.logprobs is not None and len(completion.logprobs) == 12
    for i, position in enumerate(completion.logprobs):
        row = reference[len(output.prompt_token_ids) - 1 + i]
        assert position.token_ids[0] == completion.token_ids[i]
        assert position.token_ids[1:] == row.topk(3).indices.tolist()
        assert position.sampled_rank == int((row > row[completion.token_ids[i]]).sum()) + 1
        torch.testing.assert_close(torch.tensor(position.logprobs), row[position.token_ids], atol=1e-4, rtol=0)


def test_a_seeded_draw_is_the_samplers_own_at_each_position(bundled: GPT2LMHeadModel) -> None:
    """Transformers' logits and the sampler alone, position by position, give the engine's tokens: the engine passes on seed,
    settings and the position in the output, also when it was preempted in between."""
    params = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, seed=77, max_tokens=24, ignore_eos=True)
    tight = {"max_model_len": 160, "num_gpu_blocks_override": 12}
    with LLM("gpt2-tiny", **tight) as llm:
        outputs = llm.generate(PROMPTS[:3] * 2, params)
        assert llm.engine_core._core.scheduler.stats.num_preemptions > 0, "the test is void if nothing was preempted"
    for output in outputs:
        answer, start = output.outputs[0].token_ids, len(output.prompt_token_ids) - 1
        with torch.inference_mode():
            logits = bundled(torch.tensor([[*output.prompt_token_ids, *answer]])).logits[0].float()
        alike = ([value] * 24 for value in (1.3, 40, 0.95, 0.001, 77))
        metadata = SamplingMetadata.from_lists(*alike, list(range(24)))
        assert sample(logits[start:-1], metadata).sampled_token_ids.tolist() == answer


def test_the_bundled_model_loads_as_any_other_folder() -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["n_positions"] >= 512
    assert (BUNDLED / "model.safetensors").stat().st_size <= 12_000_000
