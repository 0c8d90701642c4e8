"""EAGLE heads: their guesses are those of plain passes over the whole text. test_heads.py has what holds for every kind of heads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import COMMON, ROOMY, SETTINGS, TINY, Seen, answers, counts_of, heads_of, small_llama, spy, target, texts
from safetensors.torch import load_file
from small_eagle import SMALL, fitted_head, plain_drafts, random_head, write
from small_heads import plain_hidden
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.spec_decode.eagle_config import plan
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.errors import StagesError
from stage03_engine.llm import LLM
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run, trace

COUNT = 3


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head that is right now and then."""
    return write(tmp_path_factory.mktemp("heads") / "learned", fitted_head(SMALL, target(), texts()))


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head whose guesses depend on all that it reads: one wrong key is another guess. Two layers, a bias, and an embedding of its own."""
    config = SMALL | {"num_hidden_layers": 2}
    generator = torch.Generator().manual_seed(1)
    more = {"fc.bias": (256,), "embed_tokens.weight": (2048, 256)}
    tensors = random_head(config, scale=0.15) | {
        name: torch.randn(size, generator=generator) for name, size in more.items()
    }
    return write(tmp_path_factory.mktemp("heads") / "wild", tensors, num_hidden_layers=2)


def spec(model: str, count: int = COUNT, **more: Any) -> dict[str, Any]:
    return {"method": "eagle", "model": model, "num_speculative_tokens": count} | more


def check_drafts(seen: Seen, folder: str, model: Any) -> int:
    """Whatever is drafted is what the twin says of the tokens that were known then. Returns how many guesses that were."""
    tensors = load_file(Path(folder) / "model.safetensors")
    config = json.loads((Path(folder) / "config.json").read_text())
    longest: list[
        int
    ] = []  # the target's states of each text serve for all with which it begins: no token sees those after it
    for known, token_ids in sorted(seen, key=lambda one: one[0], reverse=True):
        if longest[: len(known)] != known:
            longest = known
            hidden = plain_hidden(model, known)
        assert token_ids == plain_drafts(config, tensors, model, hidden, known, len(token_ids)), (len(known), known)
    return sum(len(token_ids) for _, token_ids in seen)


def branching(rng: random.Random) -> list[list[int]]:
    """Prompts that share beginnings, and part in the middle of a block, at its end, and at the first token after it."""
    stem = [rng.randrange(1, 2048) for _ in range(24)]
    return [
        [*stem[:cut], rng.randrange(1, 2048), *stem[cut : cut + more]] for cut in (3, 8, 8, 12, 13) for more in (0, 5)
    ]


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("roomy", "wild"), ("small chunks", "wild"), ("preemption, small chunks", "wild"), ("preemption, swap", "wild"),
        ("preemption, small chunks", "learned"),
    ],
)  # fmt: skip
@pytest.mark.slow(keep="preemption, small chunks-wild")
def test_the_drafts_are_those_of_plain_passes(name: str, head: str, request: pytest.FixtureRequest) -> None:
    """Whatever happened to the request before: chunks, a shared beginning that goes on otherwise, drafts that stood and fell, preemption."""
    folder, rng = request.getfixturevalue(head), random.Random(5)
    settings = SETTINGS[name] | {"speculative_config": spec(folder)}
    with LLM("gpt2-tiny", **COMMON | settings) as llm:
        seen, params = spy(llm), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        for _ in range(2):
            llm.generate(branching(rng), params)
        first = branching(random.Random(5))
        llm.generate([prompt[:9] for prompt in first], params)  # what is cached goes on with other tokens
        assert counts_of(llm)["preempted"] > 0 or "preemption" not in name
        assert llm.engine_core._core.scheduler.stats.prefix_cache_hits > 0
    assert check_drafts(seen, folder, target()) > 300


def test_the_head_of_a_llama(tmp_path: Path) -> None:
    """Any target: the head sees its token embedding, its last hidden states and its output matrix only."""
    model = small_llama(tmp_path / "llama")
    own = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    head = write(tmp_path / "head", random_head(SMALL | own, scale=0.3), **own)
    settings = COMMON | ROOMY | {"tokenizer": str(TINY)}
    given = spec(head, adaptive_num_speculative_tokens=False)
    with LLM(str(tmp_path / "llama"), **settings, speculative_config=given) as llm:
        seen = spy(llm)
        llm.generate([[5, 6, 7], [9, 10]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert check_drafts(seen, head, model) > 100


def test_a_block_is_found_by_those_who_go_on_with_the_same_token(learned: str) -> None:
    """And by no others: the last key of a block depends on the token after it. Blocks of 4 tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for given, hits in ((spec(learned), (8, 4)), (None, (8, 8))):
        with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=given) as llm:
            llm.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], params)
            for last, wanted in zip(([9, 11], [11, 12]), hits):
                before = llm.engine_core._core.scheduler.stats.prefix_cache_hits
                llm.generate([[1, 2, 3, 4, 5, 6, 7, 8, *last]], params)
                assert llm.engine_core._core.scheduler.stats.prefix_cache_hits - before == wanted


def test_trace_and_replay(tmp_path: Path, learned: str) -> None:
    """A step says what was read and drafted; the decisions, which blocks were found again among them, are made again without a model."""
    trace.hold("LLM")
    trace.open(str(tmp_path))
    try:
        settings = COMMON | {"num_gpu_blocks_override": 25}
        with LLM("gpt2-tiny", **settings, speculative_config=spec(learned)) as llm:
            answers(llm)
            llm.generate(branching(random.Random(1)), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
            counts, stats = counts_of(llm), llm.engine_core._core.scheduler.stats
            assert counts["preempted"] > 0 and stats.prefix_cache_hits > 0
    finally:
        trace.close()
    run = read_run(tmp_path)
    drafted = run.named("spec.drafted")
    assert sum(event.args["num_tokens"] for event in drafted) == counts["drafted"]
    assert all(event.args["rows"] > 0 < event.args["passes"] <= COUNT for event in drafted)
    assert len(run.named("spec.caught_up")) > len(drafted)
    [result] = replay(tmp_path)
    assert result.difference is None and result.steps > 10


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"num_hidden_layers": 9}, "9 layers are more than 8: this is a model and no head"),
    ({}, {"num_attention_heads": None}, "num_attention_heads must be a positive integer, not None"),
    ({}, {"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
    ({}, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
    ({}, {"bias": 1}, "bias must be true or false"),
    ({}, {"bias": True}, "the checkpoint lacks 1 tensors: fc.bias"),
    ({}, {"add_para_norm": True}, "add_para_norm = True is not supported"),
    ({}, {"truncated_vocab_size": 100}, "truncated_vocab_size = 100 is not supported"),
    ({}, {"speculators_model_type": "eagle"}, "speculators_model_type = 'eagle' is not supported"),
    ({}, {"architectures": ["Qwen2ForCausalLM"]}, "architecture Qwen2ForCausalLM is not supported for a head"),
    ({"method": "eagle3"}, {}, "method 'eagle3' .a head on hidden states from the middle of the target.* is not built"),
]


@pytest.mark.parametrize(("given", "config", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(
    given: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "head", random_head(SMALL), **config)
    with pytest.raises(StagesError, match=message) as refused:
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=spec(folder) | given)
    assert "\n" not in str(refused.value)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """Those that depend on its form."""
    tensors = random_head(SMALL)
    broken: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        ({"layers.0.input_layernorm.weight": torch.ones(256)}, {}, "does not know: layers.0.input_layernorm.weight"),
        ({}, {"num_key_value_heads": 1}, "k_proj.weight has shape .128, 256., the configuration says .64, 256."),
        ({"embed_tokens.weight": torch.zeros(5, 256)}, {}, "embed_tokens.weight has shape .5, 256."),
    ]
    for number, (more, config, message) in enumerate(broken):
        folder = write(tmp_path / str(number), tensors | more, **config)
        with pytest.raises(StagesError, match=message):
            EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=spec(folder))


def test_a_foreign_checkpoint_is_no_head(tmp_path: Path, learned: str) -> None:
    """An ordinary Llama; and one is, as vLLM and others write it."""
    torch.manual_seed(0)
    sizes = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")}  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "llama")
    with pytest.raises(StagesError, match="the checkpoint lacks 1 tensors: fc.weight"):
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=spec(str(tmp_path / "llama")))
    tensors = load_file(Path(learned) / "model.safetensors")
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    named |= {"lm_head.weight": torch.zeros(3, 3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    inner = dict.fromkeys(SMALL) | {"model": SMALL, "model_type": "eagle", "architectures": ["EAGLEModel"]}
    wrapped = write(tmp_path / "wrapped", named, **inner)
    one, other = (
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=spec(name)) for name in (learned, wrapped)
    )
    assert one.speculative_config.draft_shape == other.speculative_config.draft_shape
    with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(wrapped)) as llm:
        llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert counts_of(llm)["drafted"] > 0


@pytest.mark.parametrize("own_embedding", [False, True])
def test_the_plan_of_the_memory_counts_every_number(
    own_embedding: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = random_head(SMALL | {"num_hidden_layers": 2}) | {"fc.bias": torch.zeros(256)}
    tensors |= {"embed_tokens.weight": torch.zeros(2048, 256)} if own_embedding else {}
    folder = write(tmp_path / "head", tensors, num_hidden_layers=2)
    plain, heads = (EngineArgs.from_kwargs(model="gpt2-tiny", **more) for more in ({}, {"speculative_config": spec(folder)}))  # fmt: skip
    count = sum(tensor.numel() for tensor in tensors.values())
    assert plan(heads.speculative_config)[1] == count
    per_token = 2 * 2 * 2 * 64 * 4  # K and V, layers, heads, their size, float32
    assert kv_block_bytes(heads) - kv_block_bytes(plain) == 16 * per_token
    given = ["--speculative-config", json.dumps(spec(folder)), "--dtype", "float32"]
    assert main(["serve", "gpt2-tiny", "--dry-run", *given]) == 0
    shown = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert float(shown["eagle_head"][1]) == pytest.approx(4 * count / 2**20, abs=0.06)
    with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(folder)) as llm:
        runner = llm.engine_core._core.executor.worker.model_runner
        hook = heads_of(llm)
        assert sum(parameter.numel() for parameter in hook.heads.parameters()) == count
        held = sum(cache.nbytes for cache in (*runner.kv_caches, *hook.kv_caches))
        assert held == 400 * kv_block_bytes(llm.vllm_config)


def test_no_folder_of_blocks_beside_it(learned: str, tmp_path: Path) -> None:
    folder = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with pytest.raises(StagesError, match="kv_transfer_config cannot be combined with an EAGLE head"):
        EngineArgs.from_kwargs(
            model="gpt2-tiny", kv_transfer_config=folder, prefix_caching_hash_seed="seed", speculative_config=spec(learned)
        )  # fmt: skip
