"""Log-probabilities of prompts against transformers: whole, in chunks, under preemption, beside others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from stage03_engine.llm import LLM
from stage03_engine.outputs import RequestOutput
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\nROMEO:\nWhat"
PROMPTS = [TEXT, "K", TEXT[20:70], "To be"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"kv_cache_memory_bytes": 50_000_000},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "kv_cache_memory_bytes": 50_000_000},
    "preempted": {
        "max_num_batched_tokens": 16, "max_num_seqs": 8, "num_gpu_blocks_override": 9, "max_model_len": 64, "block_size": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        path = llm.vllm_config.model_config.model_path
    model = GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32).eval()

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def assert_right(output: RequestOutput, k: int, reference: Any) -> None:
    ids, entries = output.prompt_token_ids, output.prompt_logprobs
    assert entries is not None and len(entries) == len(ids) and entries[0] is None
    wanted = reference(ids)
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None and entry.token_ids[0] == ids[position] and len(entry.token_ids) == k + 1
        row = wanted[position - 1]
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-4)
        assert entry.logprobs[1:] == pytest.approx(row.topk(k).values.tolist(), abs=1e-4)
        assert abs(entry.sampled_rank - 1 - int((row > row[ids[position]]).sum())) <= 1, "a near tie may swap two"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_transformers(layout: str, reference: Any) -> None:
    with LLM("gpt2-tiny", **LAYOUTS[layout]) as llm:
        asks = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=k) for k in (3, 0, 5)]
        params = [*asks, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)]
        outputs = llm.generate(PROMPTS, params)
        preemptions = llm.engine_core._core.scheduler.stats.num_preemptions
        bare = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert (preemptions > 0) == (layout == "preempted")
    for output, k in zip(outputs, (3, 0, 5)):
        assert_right(output, k, reference)
    assert outputs[3].prompt_logprobs is None
    assert outputs[0].outputs[0].token_ids == bare[0].outputs[0].token_ids


def test_preempted_in_the_middle_of_the_prompt(reference: Any) -> None:
    """The first request grows until the second, whose prompt is half computed, loses its blocks and starts again."""
    with LLM(
        "gpt2-tiny", max_num_batched_tokens=4, max_num_seqs=2, num_gpu_blocks_override=7, max_model_len=24, block_size=4
    ) as llm:
        core = llm.engine_core._core
        late = core.scheduler._preempt
        seen: list[tuple[str, int]] = []

        def preempt(request: Any, *rest: Any) -> None:
            seen.append((request.request_id, request.num_computed_tokens))
            late(request, *rest)

        core.scheduler._preempt = preempt
        params = [
            SamplingParams(temperature=0, max_tokens=18, ignore_eos=True),
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2),
        ]
        ids = llm.tokenizer.encode(TEXT)
        outputs = llm.generate([ids[:2], ids[:20]], params)
    assert any(request_id == "r1" and 0 < computed < 20 for request_id, computed in seen)
    assert_right(outputs[1], 2, reference)


def test_a_stream_has_them_once_and_first() -> None:
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        params = SamplingParams(max_tokens=6, seed=1, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
        with_them = [output.prompt_logprobs is not None for output in llm.stream("To be, or", params)]
    assert with_them[0] and not any(with_them[1:]) and len(with_them) > 2
