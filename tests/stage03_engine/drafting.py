"""What the tests of drafts share: requests of every kind, their answers, and how many drafts there were."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.spec_decode.heads import HeadsHook
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams

MAX_LEN = 96
TINY = BUNDLED_FOLDER / "gpt2-tiny"
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


@cache
def plain() -> tuple[list[Answer], int]:
    """What an engine without drafts answers, and its number of steps."""
    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        return answers(llm), counts_of(llm)["steps"]


@cache
def target() -> GPT2LMHeadModel:
    """The same model, of transformers."""
    return GPT2LMHeadModel.from_pretrained(TINY).float().eval()


def texts() -> list[list[int]]:
    """The tokens of half of the plain answers with their prompts, which heads are fitted to, so that they are right now and then."""
    with LLM("gpt2-tiny", **COMMON | ROOMY) as llm:
        prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    return [[*prompt, *answer[0]] for prompt, answer in zip(prompts, plain()[0])][::2]


def small_llama(folder: Path) -> LlamaForCausalLM:
    """Another target, saved in this folder: 48 numbers wide, with the vocabulary of gpt2-tiny."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        max_position_embeddings=128, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def heads_of(llm: LLM) -> HeadsHook:
    """What drafts with heads in an engine of this process."""
    [hook] = [hook for hook in llm.engine_core._core.executor.worker.model_runner.hooks if isinstance(hook, HeadsHook)]
    return hook


Seen = list[tuple[list[int], list[int]]]


def spy(llm: LLM) -> Seen:
    """(tokens known, tokens drafted), filled from now on."""
    hook, seen = heads_of(llm), Seen()
    drafted, batch = hook.drafted, hook.runner.batch

    def spied(scheduled: Any, scheduler_output: Any) -> Any:
        drafts = drafted(scheduled, scheduler_output)
        for request_id, token_ids in drafts.items():
            row = batch.row_of[request_id]
            seen.append((batch.token_ids[row, : batch.num_tokens[row]].tolist(), list(token_ids)))
        return drafts

    hook.drafted = spied  # type: ignore[method-assign]
    return seen
