"""A second model that drafts: the same tokens as without it, in fewer steps; and its keys and values are always where they are read."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafting import COMMON, PARAMS, ROOMY, SETTINGS, answers, check_the_same, counts_of
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.cuda_graphs.native_graphs import one_token_each
from stage03_engine.core.features.spec_decode.draft_model import DraftModelHook
from stage03_engine.core.features.spec_decode.drafter import next_length
from stage03_engine.core.input_batch import make_metadata
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.errors import StagesError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run, trace


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that is right now and then: the target's first two layers."""
    return first_layers(tmp_path_factory.mktemp("models") / "two_layers", 2)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that is always right, as long as it reads its own keys and values: a copy of the target."""
    folder = tmp_path_factory.mktemp("models") / "twin"
    return str(shutil.copytree(BUNDLED_FOLDER / "gpt2-tiny", folder, copy_function=shutil.copy))


def spec(model: str, count: int = 4, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"model": model, "num_speculative_tokens": count} | more}


@pytest.fixture(scope="module")
def plain() -> tuple[list[tuple[Any, ...]], int]:
    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        return answers(llm), counts_of(llm)["steps"]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.slow(keep=("roomy", "preemption, small chunks"))
def test_the_same_tokens_with_and_without(name: str, plain: tuple[list[Any], int], half: str) -> None:
    check_the_same(name, plain, spec(half)["speculative_config"])


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.slow(keep="probabilistic")
def test_other_ways_to_draft_leave_greedy_tokens_alone(method: str, plain: tuple[list[Any], int], half: str) -> None:
    """One certain guess leaves all tokens alone. The textbook changes those that are drawn, but not the logprobs that belong to them."""
    with LLM("gpt2-tiny", **COMMON | ROOMY | spec(half, draft_sample_method=method)) as llm:
        found = answers(llm)
        again = answers(llm)
        assert counts_of(llm)["accepted"] > 0
    random_ones = [place for place, params in enumerate(PARAMS) if not params.greedy]
    for place, (mine, wanted) in enumerate(zip(found, plain[0])):
        assert mine == wanted or (method == "probabilistic" and place in random_ones), place
    assert again == found, "seeded draws repeat"
    assert method == "greedy" or found[3] != plain[0][3]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.slow(keep="swap")
def test_a_twin_is_always_right(mode: str, twin: str) -> None:
    """Every draft stands: through blocks that other requests filled, chunks, preemption, and at any temperature. A hole in the draft's keys
    and values, or a foreign one, would be a wrong guess."""
    rng = random.Random(3)
    stem = [rng.randrange(1, 2048) for _ in range(30)]
    settings = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 24, "max_num_seqs": 5, "swap_space": 0.05}
    with LLM("gpt2-tiny", **COMMON | settings | {"preemption_mode": mode} | spec(twin, 3)) as llm:
        written: list[list[int]] = [stem]
        for _ in range(
            4
        ):  # each round goes on where answers of the one before ended, in the middle of a block or at its end
            prompts = [rng.choice(written)[: rng.randrange(8, 46)] for _ in range(6)]
            params = [
                SamplingParams(
                    temperature=rng.choice([0.0, 0.8]), seed=n, max_tokens=rng.randrange(1, 50), ignore_eos=True
                )
                for n in range(6)
            ]
            written += [[*p, *o[0]] for p, o in zip(prompts, answers(llm, prompts, params))]
        counts = counts_of(llm)
        stats = llm.engine_core._core.scheduler.stats
    assert counts["accepted"] == counts["drafted"] > 200
    assert counts["preempted"] > 0 and stats.prefix_cache_hits > 100


@pytest.mark.slow
def test_no_mix_of_requests_changes_a_token(half: str) -> None:
    """Random mixes with the draft, against each request alone without it."""
    rng = random.Random(1)
    tight = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    with LLM("gpt2-tiny", **COMMON | ROOMY) as alone, LLM("gpt2-tiny", **COMMON | tight | spec(half)) as together:
        for _ in range(12):
            stem = [rng.randrange(1, 2048) for _ in range(30)]
            prompts = [[*stem[: rng.randrange(31)], rng.randrange(1, 2048)] for _ in range(rng.randrange(2, 6))]
            params = [
                SamplingParams(
                    temperature=rng.choice([0.0, 0.8]), seed=n, max_tokens=rng.randrange(1, 20), ignore_eos=True,
                    top_p=rng.choice([1.0, 0.9]), presence_penalty=rng.choice([0.0, 1.0]),
                )
                for n in range(len(prompts))
            ]  # fmt: skip
            wanted = [answers(alone, [prompt], [each])[0] for prompt, each in zip(prompts, params)]
            assert answers(together, prompts, params) == wanted
        assert counts_of(together)["accepted"] > 0


def test_it_drafts_up_to_its_own_context(twin: str) -> None:
    """Beyond that, one token per step; and fewer drafts, or none, where the batch is large."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM("gpt2-tiny", **COMMON | ROOMY | spec(twin, 4, max_model_len=32)) as llm:
        [answer] = llm.generate([[5, 6, 7, 8]], params)
        # Prompt 4, then 5 tokens a step up to 29; 3 more drafts up to 32; then one by one up to 64.
        assert counts_of(llm)["accepted"] == 4 * 5 + 2 and len(answer.outputs[0].token_ids) == 60
    schedule = [[1, 1, 3], [2, 2, 1], [3, 8, 0]]
    for batch, drafted in ((1, 3), (2, 1), (3, 0)):
        with LLM("gpt2-tiny", **COMMON | ROOMY | spec(twin, 4, num_speculative_tokens_per_batch_size=schedule)) as llm:
            llm.generate([[5 + n] for n in range(batch)], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
            each = llm.engine_core._core.scheduler.stats.counts.get("spec_decode_num_draft_tokens", 0)
            assert (each > 0) == (drafted > 0)
            steps = {3: 1 + 2, 1: 1 + 4, 0: 9}[drafted]  # 1 token, then drafts + 1 in each
            assert llm.engine_core._core.scheduler.step == steps


def test_drafts_become_fewer_where_they_fall() -> None:
    assert next_length(4, 4, 4, 4) == 4
    assert [next_length(4, 4, accepted, 4) for accepted in range(4)] == [1, 2, 3, 4]
    assert [next_length(length, length, length, 4) for length in (1, 2, 3)] == [2, 3, 4]
    assert next_length(4, 2, 2, 4) == 4, "no room for more is no reason to want less"


def test_the_adaptive_length_has_a_switch(half: str) -> None:
    """The same tokens; fewer of the drafts fall."""
    fallen = []
    for adaptive in (True, False):
        with LLM("gpt2-tiny", **COMMON | ROOMY | spec(half, adaptive_num_speculative_tokens=adaptive)) as llm:
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
            [answer] = llm.generate("ROMEO:", params)
            counts = counts_of(llm)
            fallen.append((answer.outputs[0].token_ids, counts["drafted"] - counts["accepted"]))
    assert fallen[0][0] == fallen[1][0]
    assert fallen[0][1] < fallen[1][1]


def test_a_step_with_drafts_as_one_of_single_tokens() -> None:
    """Two requests, with 3 tokens and with 1: each token sees as much as before, in the blocks of its own request."""
    metadata = make_metadata(
        np.array([0, 3, 4]),
        np.array([9, 5]),
        np.array([[1, 2, 3], [4, 5, 0]], np.int32),
        np.arange(4),
        torch.device("cpu"),
    )
    each = one_token_each(metadata)
    assert (
        each.seq_lens_cpu == each.seq_lens.tolist() == [7, 8, 9, 5]
        and each.max_query_len == 1
        and each.max_seq_len == 9
    )
    assert each.block_table.tolist() == [[1, 2, 3]] * 3 + [[4, 5, 0]] and each.query_start_loc_cpu == [0, 1, 2, 3, 4]
    assert each.slot_mapping.tolist() == metadata.slot_mapping.tolist()


def test_its_memory_is_counted(half: str) -> None:
    plain, both = (EngineArgs.from_kwargs(model="gpt2-tiny", **more) for more in ({}, spec(half)))
    assert (
        kv_block_bytes(both) - kv_block_bytes(plain) == 2 * 2 * 256 * 4 * 16
    )  # K and V, layers, hidden size, float32, tokens
    ngram = EngineArgs.from_kwargs(
        model="gpt2-tiny", speculative_config={"method": "ngram", "num_speculative_tokens": 2}
    )
    assert kv_block_bytes(ngram) == kv_block_bytes(plain)
    with LLM("gpt2-tiny", **COMMON | ROOMY | spec(half)) as llm:
        runner = llm.engine_core._core.executor.worker.model_runner
        [hook] = [hook for hook in runner.hooks if isinstance(hook, DraftModelHook)]
        held = sum(cache.nbytes for cache in (*runner.kv_caches, *hook.kv_caches))
        assert held == 400 * kv_block_bytes(llm.vllm_config)


def test_trace_and_replay(tmp_path: Path, half: str) -> None:
    """A step says what was drafted; the decisions are made again without a model."""
    trace.hold("LLM")
    trace.open(str(tmp_path))
    try:
        with LLM("gpt2-tiny", **COMMON | {"num_gpu_blocks_override": 25} | spec(half)) as llm:
            answers(llm)
            counts = llm.engine_core._core.scheduler.stats.counts
    finally:
        trace.close()
    run = read_run(tmp_path)
    drafted = run.named("spec.drafted")
    assert sum(event.args["num_tokens"] for event in drafted) == counts["spec_decode_num_draft_tokens"]
    assert all(event.args["rows"] > 0 < event.args["passes"] <= 5 for event in drafted)
    positions = [counts.get(f"spec_decode_num_accepted_tokens_per_pos{{{position}}}", 0) for position in range(4)]
    assert sum(positions) == counts["spec_decode_num_accepted_tokens"]
    assert positions == sorted(positions, reverse=True) and positions[0] > positions[1] > 0
    [result] = replay(tmp_path)
    assert result.difference is None and result.steps > 10


@pytest.fixture
def strange(tmp_path: Path, half: str) -> Iterator[Path]:
    """A draft to be changed."""
    yield Path(shutil.copytree(half, tmp_path / "draft"))


def config_of(target: str = "gpt2-tiny", **given: Any) -> VllmConfig:
    return EngineArgs.from_kwargs(model=target, speculative_config={"num_speculative_tokens": 2} | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "gpt2-tiny"}, "model 'gpt2-tiny' is the target itself"),
        ({"model": str(BUNDLED_FOLDER / "gpt2-tiny")}, "is the target itself"),
        ({"model": "no-such-model"}, "speculative_config: model 'no-such-model' is neither a folder"),
        ({"model": 3}, "model must name .* not 3"),
        ({"method": "draft_model"}, "model must name .* not None"),
        ({"model": "HALF", "num_speculative_tokens": 0}, "num_speculative_tokens must be .* not 0"),
        ({"model": "HALF", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size can only be 1, not 2: each worker has all"),
        ({"model": "HALF", "quantization": "int8"}, "quantization can only be None, not 'int8': the draft has the dtype of the target"),
        ({"model": "HALF", "rejection_sample_method": "block"}, "rejection_sample_method can only be 'standard', not 'block'"),
        ({"model": "HALF", "draft_sample_method": "best"}, "draft_sample_method must be one of coupled, greedy, probabilistic, not 'best'"),
        ({"model": "HALF", "adaptive_num_speculative_tokens": 1}, "must be true or false, not 1"),
        ({"model": "HALF", "max_model_len": 513}, "max_model_len must be an integer in .1, 512., the draft's context, not 513"),
        ({"model": "HALF", "num_speculative_tokens_per_batch_size": [[1, 2, 3]]}, "at most 2 tokens"),
        ({"model": "HALF", "num_speculative_tokens_per_batch_size": 3}, "must be a list of"),
        ({"model": "HALF", "num_speculative_token": 3}, "unknown key 'num_speculative_token'.*did you mean num_speculative_tokens"),
        ({"model": "HALF", "prompt_lookup_max": 3}, "unknown key 'prompt_lookup_max'"),
        ({"model": "HALF", "method": "eagle3"}, "method 'eagle3' .a head .* is not built"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_key(given: dict[str, Any], message: str, half: str) -> None:
    with pytest.raises(StagesError, match=message):
        config_of(**{key: half if value == "HALF" else value for key, value in given.items()})


def test_a_draft_speaks_the_targets_language(strange: Path) -> None:
    tokenizer = json.loads((strange / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (strange / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        StagesError, match="has another tokenizer than the target: .* is token .* of the draft and .* of the target"
    ):
        config_of(model=str(strange))
    (strange / "tokenizer.json").unlink()
    assert config_of(model=str(strange)).speculative_config.method == "draft_model", "one that brings none is no worse"
    shape = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(shape | {"vocab_size": 2000}))
    with pytest.raises(StagesError, match="has 2000 tokens in its vocabulary, and the target 2048"):
        config_of(model=str(strange))
