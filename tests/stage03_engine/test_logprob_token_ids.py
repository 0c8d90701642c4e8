"""The logprobs of named tokens against transformers: beside others, under preemption, with drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

NAMED = [[17, 3, 200, 3], [5], [], list(range(100, 228))]
REPEATS = "to be or not to be or not to be or not to be or not"  # drafts from the prompt will stand
LAYOUTS: dict[str, dict[str, Any]] = {
    "together": {"kv_cache_memory_bytes": 50_000_000},
    "preempted": {
        "max_num_batched_tokens": 16, "max_num_seqs": 8, "num_gpu_blocks_override": 9, "max_model_len": 64, "block_size": 8,
    },
    "drafts": {
        "kv_cache_memory_bytes": 50_000_000,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_transformers(layout: str) -> None:
    asks = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=k, logprob_token_ids=named)
        for k, named in zip((0, 5, 3, 1), NAMED)
    ]
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=4)
    with LLM("gpt2-tiny", **LAYOUTS[layout]) as llm:
        outputs = llm.generate([REPEATS] * 5, [*asks, plain])
        model = GPT2LMHeadModel.from_pretrained(llm.vllm_config.model_config.model_path, dtype=torch.float32).eval()
    for output, named in zip(outputs, [*NAMED, None]):
        answer, prompt = output.outputs[0], output.prompt_token_ids
        with torch.inference_mode():
            rows = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        for row, token, entry in zip(rows, answer.token_ids, answer.logprobs):
            assert entry.token_ids[0] == token and entry.token_ids[1:] == (
                named if named is not None else entry.token_ids[1:]
            )
            assert len(entry.token_ids) == 5 or named is not None
            assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-4)
