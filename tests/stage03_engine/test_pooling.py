"""Vectors against transformers: whole, in chunks, with cached prefixes, preempted and swapped; and what is refused."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import GPT2Model

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.pooling.manifest import parse_pooling
from stage03_engine.core.features.pooling.pooler import PoolingState
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.pooling_params import POOLING_TYPES, PoolingParams, PoolingRule
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\nROMEO:\nWhat"
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 12, "max_num_seqs": 4, "num_gpu_blocks_override": 9, "max_model_len": 32, "block_size": 4,
    "long_prefill_token_threshold": 3,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"kv_cache_memory_bytes": 50_000_000},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "kv_cache_memory_bytes": 50_000_000},
    "preempted": TIGHT,
    "swapped": TIGHT | {"preemption_mode": "swap", "swap_space": 0.01},
    "no cache": TIGHT | {"enable_prefix_caching": False},
}


def copy_of_gpt2_tiny(folder: Path, **config: Any) -> str:
    """The same model, whose config.json says more."""
    own = BUNDLED_FOLDER / "gpt2-tiny"
    for file in own.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(json.loads((own / "config.json").read_text()) | config))
    return str(folder)


@pytest.fixture(scope="module")
def cuttable(tmp_path_factory: pytest.TempPathFactory) -> str:
    return copy_of_gpt2_tiny(tmp_path_factory.mktemp("cuttable"), is_matryoshka=True)


@pytest.fixture(scope="module")
def reference() -> Any:
    path = BUNDLED_FOLDER / "gpt2-tiny"
    model = GPT2Model.from_pretrained(path, dtype=torch.float32).eval()

    def vectors(ids: list[int], params: PoolingParams) -> torch.Tensor:
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        if params.task == "embed":
            kind = params.pooling_type or "LAST"
            states = {"LAST": states[-1:], "CLS": states[:1], "MEAN": states.mean(0, keepdim=True)}[kind]
        states = states[:, : params.dimensions]
        return states if params.normalize is False else states / states.norm(dim=-1, keepdim=True)

    return vectors


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN", "ALL"])
def test_what_the_pooler_keeps_is_its_own(kind: Any) -> None:
    """A replayed CUDA graph writes the next step's hidden states where this step's were."""
    state, hidden = PoolingState(PoolingRule(kind, False, 2, None), 2), torch.tensor([[1.0, 2.0]])
    state.add(hidden, 0)
    hidden.fill_(9.0)
    state.add(hidden, 1)
    hidden.fill_(7.0)
    one, nine = [1.0, 2.0], [9.0, 9.0]
    wanted = {"LAST": [nine], "CLS": [one], "MEAN": [[5.0, 5.5]], "ALL": [one, nine]}[kind]
    assert state.pooled().tolist() == wanted


def assert_right(output: RequestOutput, params: PoolingParams, reference: Any) -> None:
    assert output.finished and output.result is not None
    found = torch.tensor([array("f", vector).tolist() for vector in output.result["pooled"]])
    torch.testing.assert_close(found, reference(output.prompt_token_ids, params), atol=2e-5, rtol=1e-4)


all_params = st.builds(
    PoolingParams,
    task=st.sampled_from(["embed", "embed", "token_embed"]),
    pooling_type=st.sampled_from([None, *POOLING_TYPES]),
    normalize=st.sampled_from([None, True, False]),
    dimensions=st.sampled_from([None, 1, 7, 256]),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_transformers_however_the_prompts_are_computed(layout: str, cuttable: str, reference: Any) -> None:
    preemptions = hits = 0
    with LLM(cuttable, runner="pooling", check_invariants=True, **LAYOUTS[layout]) as llm:
        ids = llm.tokenizer.encode(TEXT)
        slices = st.tuples(st.integers(0, 3), st.integers(5, 30)).map(lambda pair: ids[pair[0] : pair[1]])

        @settings(max_examples=8)
        @given(st.lists(st.tuples(slices, all_params), min_size=1, max_size=6))
        def check(asks: list[tuple[list[int], PoolingParams]]) -> None:
            prompts, params = [list(prompt) for prompt, _ in asks], [each for _, each in asks]
            for output, each in zip(llm.encode(prompts, params), params, strict=True):
                assert_right(output, each, reference)

        check()
        everything = [PoolingParams(pooling_type=kind) for kind in POOLING_TYPES] + [PoolingParams(task="token_embed")]
        for output, each in zip(llm.encode([ids[:29]] * 4, everything), everything, strict=True):
            assert_right(output, each, reference)
        for _ in range(2):  # alone, so that the second finds what the first has left
            assert_right(llm.encode([ids[:20]], PoolingParams())[0], PoolingParams(), reference)
        core = llm.engine_core._core
        assert not core.scheduler.requests and core.scheduler.kv_cache_manager.block_pool.num_free > 0
        preemptions, hits = core.scheduler.stats.num_preemptions, core.scheduler.stats.prefix_cache_hits
        llm.encode("K")
        llm.encode("K")
        pooling = core.executor.worker.model_runner.hooks[0]
        assert len(pooling._pooler._states) <= 1, "states of requests that ended are kept"
    assert (preemptions > 0) == (layout in ("preempted", "swapped", "no cache"))
    assert (hits > 0) == (layout != "no cache"), "the last token alone needs no hidden states of the others"


def test_only_what_pools_the_last_token_reads_the_prefix_cache() -> None:
    with LLM("gpt2-tiny", runner="pooling", kv_cache_memory_bytes=50_000_000, block_size=4) as llm:
        ids = llm.tokenizer.encode(TEXT)[:21]
        llm.encode(ids)
        for params, cached in ((PoolingParams(), 20), (PoolingParams(pooling_type="MEAN"), 0)):
            assert llm.encode(ids, params)[0].num_cached_tokens == cached
        assert llm.encode(ids, PoolingParams(task="token_embed"))[0].num_cached_tokens == 0


def test_the_servers_settings_count_for_what_the_request_leaves_open(cuttable: str, reference: Any) -> None:
    config = {"pooling_type": "mean", "normalize": False, "dimensions": 5}
    with LLM(cuttable, convert="embed", pooler_config=config, kv_cache_memory_bytes=50_000_000) as llm:
        wanted = PoolingParams(pooling_type="MEAN", normalize=False, dimensions=5)
        assert_right(llm.encode(TEXT)[0], wanted, reference)
        assert_right(llm.encode(TEXT, PoolingParams(dimensions=9, pooling_type="LAST"))[0],
                     PoolingParams(normalize=False, dimensions=9), reference)  # fmt: skip


def test_limits_of_requests(cuttable: str) -> None:
    with LLM(cuttable, runner="pooling", kv_cache_memory_bytes=50_000_000, max_model_len=16) as llm:
        assert len(llm.encode([3] * 16)) == 1, "no token follows, so the prompt may fill the context"
        for prompt, params, field in (
            ([3] * 17, PoolingParams(), "input"),
            ("", PoolingParams(), "input"),
            ([10**9], PoolingParams(), "prompt"),
            ("a", PoolingParams(dimensions=0), "dimensions"),
            ("a", PoolingParams(dimensions=257), "dimensions"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                llm.encode([prompt], params)
            assert refused.value.param == field
        with pytest.raises(InvalidRequestError, match="vectors, not text"):
            llm.generate("a", SamplingParams(max_tokens=1))
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm, pytest.raises(InvalidRequestError, match="runner"):
        llm.encode("a")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [({"is_matryoshka": True}, (True, None)), ({"matryoshka_dimensions": [64, 128]}, (True, (64, 128))),
     ({}, (False, None)), ({"is_matryoshka": False, "matryoshka_dimensions": None}, (False, None))],
)  # fmt: skip
def test_the_models_own_config_says_whether_its_vectors_can_be_cut(
    config: dict[str, Any], sizes: tuple[bool, tuple[int, ...] | None], tmp_path: Path
) -> None:
    made = EngineArgs.from_kwargs(model=copy_of_gpt2_tiny(tmp_path, **config), runner="pooling").pooling_config
    assert (made.is_matryoshka, made.matryoshka_dimensions) == sizes


@pytest.mark.parametrize("sizes", ["64", [0], [1.5], [True], {"a": 1}])
def test_a_config_with_impossible_sizes_is_refused(sizes: Any, tmp_path: Path) -> None:
    model = copy_of_gpt2_tiny(tmp_path, matryoshka_dimensions=sizes)
    with pytest.raises(ConfigError, match="list of positive integers"):
        EngineArgs.from_kwargs(model=model, runner="pooling")


@pytest.mark.parametrize(
    ("runner", "convert", "given_config", "said"),
    [
        ("draft", "auto", None, "draft is not built"),
        ("generate", "classify", None, "needs runner pooling"),
        ("generate", "embed", None, "needs runner pooling"),
        ("pooling", "none", None, "needs convert embed"),
        ("auto", "auto", {}, "needs runner pooling"),
        ("pooling", "auto", {"pooling_typ": "MEAN"}, "did you mean"),
        ("pooling", "auto", {"pooling_type": "MAX"}, "one of LAST, MEAN, CLS"),
        ("pooling", "auto", {"normalize": 1}, "true or false"),
        ("pooling", "auto", {"dimensions": 0}, "positive integer"),
        ("pooling", "auto", {"normalize": True, "use_activation": True}, "twice"),
    ],
)
def test_impossible_settings(runner: str, convert: str, given_config: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_pooling(runner, convert, given_config)


def test_a_recording_is_decided_again(tmp_path: Path) -> None:
    trace.open(str(tmp_path))
    try:
        with LLM("gpt2-tiny", runner="pooling", **TIGHT) as llm:
            ids = llm.tokenizer.encode(TEXT)
            kinds = [PoolingParams(pooling_type=kind) for kind in ("MEAN", "LAST", "CLS", "LAST")]
            llm.encode([ids[:29]] * 4, kinds)
            llm.encode([ids[:29]] * 2, kinds[:2])
    finally:
        trace.close()
    (result,) = replay(tmp_path)
    assert result.difference is None and result.requests == 6
