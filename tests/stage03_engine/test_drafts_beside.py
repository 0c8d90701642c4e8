"""A draft model, or an EAGLE head, beside what else changes a request's logits or its cache: 50 requests, mixed at random, against each alone and without drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drafting import COMMON, ROOMY, counts_of
from small_adapters import write_adapter
from small_eagle import SMALL, fitted_head, write
from small_gpt2 import first_layers
from transformers import GPT2LMHeadModel

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import StagesError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 32, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_layers(tmp_path_factory.mktemp("models") / "two_layers", 2)


@pytest.fixture(scope="module")
def head(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fitted to some of what the model writes."""
    prompts = [[number, number + 1] for number in range(5, 1200, 60)]
    with LLM(model, **COMMON | ROOMY) as llm:
        written = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    texts = [[*prompt, *answer.outputs[0].token_ids] for prompt, answer in zip(prompts, written)]
    plain = GPT2LMHeadModel.from_pretrained(model).float().eval()
    return write(tmp_path_factory.mktemp("heads") / "head", fitted_head(SMALL, plain, texts))


@pytest.fixture(params=["a draft model", "an EAGLE head"])
def drafts(request: pytest.FixtureRequest) -> dict[str, Any]:
    given: dict[str, Any] = {"model": "gpt2-tiny-draft"}
    if request.param == "an EAGLE head":
        given = {"method": "eagle", "model": request.getfixturevalue("head")}
    return {"speculative_config": given | {"num_speculative_tokens": 3}}


def check_mixed(model: str, drafts: dict[str, Any], settings: dict[str, Any], adapters: list[str | None]) -> None:
    """Greedy, with common beginnings, in batches of any size."""
    rng = random.Random(7)
    stems = [[rng.randrange(1, 2048) for _ in range(30)] for _ in range(3)]
    prompts = [[*rng.choice(stems)[: rng.randrange(31)], rng.randrange(1, 2048)] for _ in range(50)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=rng.randrange(1, 24), ignore_eos=True, **{"lora": rng.choice(adapters)} if adapters else {}
        )
        for _ in prompts
    ]  # fmt: skip
    with LLM(model, **COMMON | ROOMY | settings) as llm:
        wanted = [llm.generate([prompt], each)[0].outputs[0].token_ids for prompt, each in zip(prompts, params)]
    with LLM(model, **COMMON | TIGHT | settings | drafts) as llm:
        start = 0
        while start < len(prompts):
            end = start + rng.randrange(1, 30)
            found = [each.outputs[0].token_ids for each in llm.generate(prompts[start:end], params[start:end])]
            assert found == wanted[start:end]
            start = end
        counts = counts_of(llm)
    assert counts["drafted"] > counts["accepted"] > 50 and counts["preempted"] > 0


@pytest.mark.slow(keep="a draft model")
def test_with_and_without_adapters(model: str, drafts: dict[str, Any], tmp_path: Path) -> None:
    """What drafts guesses for them too, a little worse."""
    names = {
        name: write_adapter(tmp_path / name, Path(model), seed=seed)
        for seed, name in enumerate(("poet", "painter"), start=1)
    }
    modules = tuple(f"{name}={folder}" for name, folder in names.items())
    check_mixed(model, drafts, {"enable_lora": True, "max_loras": 2, "lora_modules": modules}, [None, None, *names])


@pytest.mark.slow(keep="an EAGLE head")
def test_in_an_8_bit_kv_cache(model: str, drafts: dict[str, Any]) -> None:
    """What a token's key becomes depends on the token alone, whether it was a draft or not."""
    check_mixed(model, drafts, {"kv_cache_dtype": "int8"}, [])


def test_nothing_that_depends_on_drafts_where_nothing_may_depend_on_the_batch() -> None:
    """Whether a token was drafted depends on the other requests, and the textbook's draws depend on that."""
    for method in ("coupled", "greedy", "probabilistic"):
        given = {"model": "gpt2-tiny-draft", "num_speculative_tokens": 2, "draft_sample_method": method}
        if method != "probabilistic":
            EngineArgs.from_kwargs(model="gpt2-tiny", batch_invariant=True, speculative_config=given)
            continue
        with pytest.raises(
            StagesError, match="probabilistic cannot be combined with batch_invariant: a token depends on"
        ):
            EngineArgs.from_kwargs(model="gpt2-tiny", batch_invariant=True, speculative_config=given)
