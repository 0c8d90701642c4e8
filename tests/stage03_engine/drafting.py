"""What the tests of drafts share: requests of every kind, their answers, and how many drafts there were."""

from __future__ import annotations

from typing import Any

from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.llm import LLM
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams

MAX_LEN = 96
COMMON: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": 4, "num_threads": 1}
ROOMY = {"num_gpu_blocks_override": 400}
SETTINGS = {
    "roomy": ROOMY,
    "no prefix cache": ROOMY | {"enable_prefix_caching": False},
    "small chunks": ROOMY | {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "preemption, small chunks": {"num_gpu_blocks_override": 25, "max_num_batched_tokens": 16, "max_num_seqs": 6},
    "preemption, swap": {"num_gpu_blocks_override": 25, "preemption_mode": "swap", "swap_space": 0.05},
    "multiprocess": {"num_gpu_blocks_override": 25, "multiprocess": True},
}
"""Engines in which COMMON's requests are chunked, preempted, shared or not."""
PROMPTS = [
    "First Citizen:\nWe are",
    "To be, or not to be",
    "a a a a",
    "ROMEO:",
    "KING RICHARD:",
    "and the",
    "yes or no",
    "First Citizen:\nWe are",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=13, logprobs=2),
    SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=30, top_p=0.9, logprobs=0),
    SamplingParams(temperature=0.3, seed=6, max_tokens=30, top_k=20),
    SamplingParams(temperature=0.8, seed=7, max_tokens=25, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=20, bad_words=["the"]),
    SamplingParams(temperature=0.8, seed=8, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, stop=["e"]),
]  # fmt: skip

Answer = tuple[Any, ...]


def answers(llm: LLM, prompts: list[Any] = PROMPTS, params: list[SamplingParams] = PARAMS) -> list[Answer]:
    """Tokens, text, why it ended, and the ranks of the tokens, where they are asked for."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    ranks = [[each.sampled_rank for each in output.logprobs or ()] for output in outputs]
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason, r) for o, r in zip(outputs, ranks)]


def counts_of(llm: LLM) -> dict[str, int]:
    """How many drafts there were, and how many stood."""
    scheduler = llm.engine_core._core.scheduler
    check_invariants(scheduler)
    names = {"drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}
    found = {short: scheduler.stats.counts.get(name, 0) for short, name in names.items()}
    return found | {"steps": scheduler.step, "preempted": scheduler.stats.num_preemptions}


def check_the_same(name: str, plain: tuple[list[Answer], int], speculative_config: dict[str, Any]) -> None:
    """The engine SETTINGS[name] with these drafts gives the answers of a plain one, whose steps are counted; and some drafts stood, some fell."""
    with LLM("gpt2-tiny", **COMMON | SETTINGS[name], speculative_config=speculative_config) as llm:
        assert answers(llm) == plain[0]
        if "multiprocess" in name:
            return
        counts = counts_of(llm)
    assert counts["drafted"] > counts["accepted"] > 0
    assert counts["preempted"] > 0 or "preemption" not in name
    assert name != "roomy" or counts["steps"] < plain[1]
