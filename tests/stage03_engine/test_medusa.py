"""Medusa heads: their guesses are those of a plain forward pass. test_heads.py has what holds for every kind of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafting import COMMON, ROOMY, SETTINGS, TINY, answers, counts_of, heads_of, plain, small_llama, spy, target, texts
from safetensors.torch import load_file
from small_heads import plain_hidden
from small_medusa import HEADS, VOCAB, fitted_heads, plain_guesses, random_heads, write
from torch import Tensor

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.spec_decode.medusa import MedusaHeads
from stage03_engine.core.features.spec_decode.medusa_config import plan
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.errors import StagesError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads that are right now and then."""
    return write(tmp_path_factory.mktemp("heads") / "learned", fitted_heads(target(), texts()))


def spec(model: str, count: int = HEADS, **more: Any) -> dict[str, Any]:
    return {"method": "medusa", "model": model, "num_speculative_tokens": count} | more


def check_guesses(llm: LLM, model: Any, tensors: dict[str, Tensor], prompts: list[list[int]]) -> int:
    """Whatever is drafted is what the twin says of the tokens that were known then. Returns how many guesses that were."""
    seen = spy(llm)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    for known, token_ids in seen:
        wanted = plain_guesses(tensors, plain_hidden(model, known)[-2])  # the last one is not computed yet
        assert token_ids == wanted[: len(token_ids)], known
    return sum(len(token_ids) for _, token_ids in seen)


@pytest.mark.slow(keep="preemption, swap")
@pytest.mark.parametrize("name", ["roomy", "small chunks", "preemption, small chunks", "preemption, swap"])
def test_the_guesses_are_those_of_a_plain_pass(name: str, learned: str) -> None:
    """Whatever happened to the request before: chunks, a shared beginning, drafts that stood and fell, preemption."""
    prompts = [
        [5, 6, 7, 8, 9, 10, 11, 12, 13],
        [5, 6, 7, 8, 9, 10, 11, 12, 14],
        [100],
        *([[200 + n, 3, 4] for n in range(4)]),
    ]
    tensors = load_file(Path(learned) / "model.safetensors")
    with LLM("gpt2-tiny", **COMMON | SETTINGS[name], speculative_config=spec(learned)) as llm:
        assert check_guesses(llm, target(), tensors, prompts) > 100
        assert counts_of(llm)["preempted"] > 0 or "preemption" not in name


@torch.inference_mode()
def test_every_form_of_a_checkpoint(tmp_path: Path) -> None:
    """Two layers with biases, the makers' names, one output matrix for all heads, and a part of the vocabulary."""
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.05

    blocks = {
        f"blocks.{head}.layers.{layer}.{kind}": random(*size)
        for head in range(HEADS) for layer in range(2) for kind, size in (("weight", (256, 256)), ("bias", (256,)))
    }  # fmt: skip
    kept = torch.randperm(VOCAB, generator=generator)[:500]
    matrix = random(VOCAB, 256)
    only = torch.full((VOCAB, 1), -1e9).index_fill(0, kept, 0.0)
    forms: dict[str, tuple[dict[str, Tensor], dict[str, Any], Tensor | None]] = {
        "one matrix": ({"lm_heads.0.weight": matrix}, {"original_lm_head": True}, None),
        "map, whole matrix": (
            {"lm_heads.0.weight": matrix, "token_map": kept}, {"original_lm_head": True, "truncated_vocab_size": 500}, only,
        ),
        "map, its rows": (
            {f"lm_heads.{head}.weight": matrix[kept] for head in range(HEADS)} | {"token_map": kept}, {"truncated_vocab_size": 500}, only,
        ),
    }  # fmt: skip
    for number, (more, config, mask) in enumerate(forms.values()):
        stored = {
            f"medusa_heads.{name}" if name != "token_map" else name: each for name, each in (blocks | more).items()
        }
        named = {"num_heads": None, "num_hidden_layers": None, "medusa_num_heads": HEADS, "medusa_num_layers": 2}
        folder = write(tmp_path / str(number), stored, **named, medusa_fc_bias=True, **config)
        with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(folder)) as llm:
            hidden = plain_hidden(target(), [3, 4, 5])
            for head in range(HEADS):
                x = hidden
                for layer in range(2):
                    name = f"blocks.{head}.layers.{layer}"
                    x = x + F.silu(F.linear(x, blocks[name + ".weight"], blocks[name + ".bias"]))
                wanted = x @ matrix.T
                found = heads_of(llm).heads.compute_logits(hidden, head)
                if mask is not None:
                    assert (found.isinf() == (mask.T < 0).expand_as(found)).all()
                    found, wanted = found[:, kept], wanted[:, kept]
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_heads_of_a_llama(tmp_path: Path) -> None:
    """Any target: the heads see its last hidden state only."""
    model = small_llama(tmp_path / "llama")
    tensors = random_heads(48, scale=0.5)
    heads = write(tmp_path / "heads", tensors, hidden_size=48)
    settings = COMMON | ROOMY | {"tokenizer": str(TINY)}
    with LLM(
        str(tmp_path / "llama"), **settings, speculative_config=spec(heads, adaptive_num_speculative_tokens=False)
    ) as llm:
        assert check_guesses(llm, model, tensors, [[5, 6, 7], [9]]) > 100


def test_they_take_no_blocks(learned: str) -> None:
    plain, heads = (
        EngineArgs.from_kwargs(model="gpt2-tiny", **more) for more in ({}, {"speculative_config": spec(learned)})
    )
    assert kv_block_bytes(heads) == kv_block_bytes(plain)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"num_heads": "3"}, "num_heads must be a positive integer, not '3'"),
    ({}, {"num_heads": 10**6}, "1000000 heads of 1 layers are more than 128"),
    ({}, {"truncated_vocab_size": 3000}, "truncated_vocab_size 3000 is more"),
    ({}, {"medusa_fc_bias": 1}, "medusa_fc_bias must be true or false"),
    ({"num_speculative_tokens": 4}, {}, "num_speculative_tokens must be at most 3, a token for each head, not 4"),
]


@pytest.mark.parametrize(("given", "config", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(
    given: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "heads", random_heads(), **config)
    with pytest.raises(StagesError, match=message) as refused:
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=spec(folder) | given)
    assert "\n" not in str(refused.value)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """Those that depend on their form."""
    few = {"truncated_vocab_size": 10}
    broken: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        ({"blocks.0.layers.1.weight": torch.zeros(256, 256)}, {}, "does not know: blocks.0.layers.1.weight"),
        ({}, few, "no token_map says which tokens"),
        ({"token_map": torch.arange(9)}, few, "token_map has shape .9., the configuration says .10."),
        ({"token_map": torch.arange(2040, 2050)}, few, "token_map must be 10 token ids below 2048"),
        ({"token_map": torch.arange(10.0)}, few, "token_map must be 10 token ids below 2048"),
    ]
    for number, (more, config, message) in enumerate(broken):
        folder = write(tmp_path / str(number), random_heads() | more, **config)
        with pytest.raises(StagesError, match=message):
            LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(folder))


@pytest.mark.slow
def test_beside_a_folder_of_blocks(tmp_path: Path, learned: str) -> None:
    """They have no keys and values that such a folder would lack: the second engine finds the blocks of the first."""
    folder = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    for _ in range(2):
        settings = COMMON | ROOMY | {"kv_transfer_config": folder, "prefix_caching_hash_seed": "seed"}
        with LLM("gpt2-tiny", **settings, speculative_config=spec(learned)) as llm:
            assert answers(llm) == plain()[0]
            assert counts_of(llm)["accepted"] > 0
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("one_output_matrix", [False, True])
def test_the_plan_of_the_memory_counts_every_number(
    bias: bool, one_output_matrix: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"medusa_fc_bias": bias, "original_lm_head": one_output_matrix, "num_hidden_layers": 2}
    folder = write(tmp_path / "heads", {}, **config, truncated_vocab_size=100)
    given = ["--load-format", "dummy", "--speculative-config", json.dumps(spec(folder)), "--dtype", "float32"]
    engine = EngineArgs.from_kwargs(model="gpt2-tiny", load_format="dummy", speculative_config=spec(folder))
    heads = engine.speculative_config.draft_heads
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in MedusaHeads(**heads).parameters())
    assert plan(engine.speculative_config)[1] == count
    assert main(["serve", "gpt2-tiny", "--dry-run", *given]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "medusa_heads" in line]
    assert float(row[1]) == pytest.approx(4 * count / 2**20, abs=0.06) and row[2] == "MiB"
