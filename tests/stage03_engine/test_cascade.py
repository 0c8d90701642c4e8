"""Cascade attention in the engine: the tokens are those of one pass, the trace says which steps take it, and what turns it off."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from drafting import small_llama
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.cascade_attention.cascade_attention import CascadeHook
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.features.cascade_attention import plan as rule
from stagetrace import read_run

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "triton-interpret", "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64, "max_model_len": 96, "block_size": 8,
}  # fmt: skip
PREFIX = list(range(5, 45))  # 5 blocks
PROMPTS = [PREFIX + [50 + n] * (1 + n % 3) for n in range(5)] + [[7, 8, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "as it starts": {},
    "chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 6},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}},
    "ahead": {"async_scheduling": True},
    "bfloat16": {"dtype": "bfloat16"},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small ones: the interpreter takes its time."""
    folder = tmp_path_factory.mktemp("cascade")
    small_llama(folder / "llama")
    return {"gpt2": first_layers(folder / "gpt2", 1), "llama": str(folder / "llama")}


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests with 16 tokens in common are enough here."""
    monkeypatch.setattr(rule, "MIN_REQUESTS", 3)
    monkeypatch.setattr(rule, "MIN_TOKENS", 16)


def answers(model: str, folder: Path, **settings: Any) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Greedy tokens, and what the trace says of shared prefixes. The first request fills the prefix cache, the others find it."""
    with LLM(model, **SETTINGS | settings, trace=str(folder)) as llm:
        llm.generate([[*PREFIX, 3]], GREEDY)
        outputs = llm.generate(PROMPTS, GREEDY)
    events = [event.args for event in read_run(folder).events if event.name == "attention.cascade"]
    return [list(output.outputs[0].token_ids) for output in outputs], events


@pytest.mark.parametrize(("model", "name"), [*(("gpt2", name) for name in VARIANTS), ("llama", "as it starts")])
@pytest.mark.slow(keep="gpt2-drafts")
def test_the_tokens_are_those_of_one_pass(
    models: dict[str, str], model: str, name: str, small_bounds: None, tmp_path: Path
) -> None:
    settings = VARIANTS[name]
    expected, none = answers(models[model], tmp_path / "off", **settings, disable_cascade_attn=True)
    tokens, events = answers(models[model], tmp_path / "on", **settings)
    assert tokens == expected
    assert not none and events
    assert all(event["requests"][0] >= 3 and event["shared_tokens"] == [40] for event in events)
    assert all(event["saved_bytes"] > 0 for event in events)


@pytest.mark.parametrize(
    ("settings", "installed"),
    [
        ({"attention_backend": "triton"}, True),
        ({"attention_backend": "triton-interpret", "device": "cpu"}, True),
        ({"attention_backend": "triton", "disable_cascade_attn": True}, False),
        ({"attention_backend": "triton", "enable_prefix_caching": False}, False),
        ({"attention_backend": "triton", "kv_cache_dtype": "int8"}, False),
        ({"attention_backend": "triton", "kv_cache_dtype": "float32", "dtype": "float32"}, True),
        ({"batch_invariant": True, "device": "cpu"}, False),
        ({"attention_backend": "torch"}, False),
        ({}, True),  # on a GPU, the Triton kernels
        ({"device": "cpu"}, False),
    ],
)
def test_what_turns_it_off(settings: dict[str, Any], installed: bool) -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", **{"device": "cuda"} | settings)
    assert any("CascadeHook" in name for name in config.hooks("runner")) == installed


@pytest.mark.parametrize("asked", [{"optimization_level": 3}, {"compilation_config": {"mode": 1}}])
def test_the_graph_of_a_compiled_model_has_it_in_its_one_operation(asked: dict[str, Any]) -> None:
    """It comes before the hook that hides each layer's attention from torch.compile."""
    config = EngineArgs.from_kwargs(model="gpt2-tiny", device="cuda", **asked)
    names = [name.rpartition(":")[2] for name in config.hooks("runner")]
    assert names.index("CascadeHook") < names.index("CompiledModelHook")


@pytest.mark.parametrize(
    ("device", "eager", "query_len", "least"),
    [("cpu", False, 1, 0), ("cuda", False, 1, rule.RECORDING_BYTES), ("cuda", False, 2, rule.LAUNCHES_BYTES),
     ("cuda", True, 1, rule.LAUNCHES_BYTES)],
)  # fmt: skip
def test_it_is_taken_from_the_stated_bytes_on(device: str, eager: bool, query_len: int, least: int) -> None:
    """One block less than what pays, and as much: of a step that would be replayed it asks more."""
    requests, size = 9, 16
    blocks = 17  # in each prefix: 8 requests save 136 blocks
    runner = MagicMock(device=MagicMock(type=device), block_size=size)
    ids = [f"r{n}" for n in range(requests)]
    runner.batch.row_of = {name: n for n, name in enumerate(ids)}
    runner.batch.block_table = np.tile(np.arange(1, 40, dtype=np.int32), (requests, 1))
    context = [blocks * size + query_len] * requests
    for saved in (least - 1, least) if least else (1,):
        runner.kv_caches = [MagicMock()]
        runner.kv_caches[0].__getitem__.return_value.nbytes = saved / ((requests - 1) * blocks)
        starts = list(range(0, (requests + 1) * query_len, query_len))
        nothing = torch.zeros(requests + 1, dtype=torch.int32)
        metadata = AttentionMetadata(
            nothing, nothing, torch.zeros(1, 1), nothing, starts, context, query_len, max(context)
        )
        inputs = MagicMock(metadata=metadata, replayable=True)
        hook = CascadeHook(runner, cast(Any, MagicMock(device_config=MagicMock(enforce_eager=eager))))
        hook.prepared(inputs, MagicMock(num_scheduled_tokens=dict.fromkeys(ids, query_len)))
        assert (rule.KEY in metadata.plans) == (not inputs.replayable) == (saved >= least)
