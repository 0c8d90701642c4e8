"""The same workload through every policy: timing may change, greedy tokens in float32 may not.

200 random workloads, each through one engine with all the room in the world and one request at a time, and through two
others drawn from all combinations of prefix caching, chunk size, preemption mode and batch limit, with KV caches so small that they
must preempt. Some of those have drafts (speculative decoding), some schedule asynchronously, some have a process of their own, some
priorities or fair turns.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from small_gpt2 import first_layers

from stage03_engine.frontend.features.in_process.inproc_client import InprocClient
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

COMBINATIONS = list(itertools.product([True, False], [8, 32, 512], ["recompute", "swap"], [3, 8]))
WORKLOADS, ENGINES_PER_WORKLOAD, BATCHES = 200, 2, 8


POLICIES = ("fcfs", "priority", "fair")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def make_engine(model: str, number: int) -> LLM:
    caching, budget, mode, max_num_seqs = COMBINATIONS[number]
    policy = POLICIES[number % 3]
    llm = LLM(
        model, max_model_len=96, block_size=4, num_gpu_blocks_override=30, multiprocess=number % 12 == 5,
        enable_prefix_caching=caching, max_num_batched_tokens=budget, preemption_mode=mode, max_num_seqs=max_num_seqs,
        swap_space=0.01, speculative_config=NGRAM if number % 5 < 2 else None, scheduling_policy=policy,
        async_scheduling=number % 5 in (2, 3),
    )  # fmt: skip
    if policy == "fair":  # as if the prompts came in two HTTP requests
        numbers = itertools.count()
        llm.next_id = lambda: f"cmpl-{(number := next(numbers)) % 2}-{number}"  # type: ignore[method-assign]
    return llm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers: enough to mix up the caches of one with those of the other."""
    return first_layers(tmp_path_factory.mktemp("models") / "two_layers", 2)


@pytest.fixture(scope="module")
def engines(model: str) -> Iterator[list[LLM]]:
    engines = [make_engine(model, number) for number in range(len(COMBINATIONS))]
    yield engines
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def reference(model: str) -> Iterator[LLM]:
    with LLM(model, max_model_len=96, enable_prefix_caching=False, max_num_seqs=1, num_gpu_blocks_override=20) as llm:
        yield llm


def make_workload(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """A few requests; some share a beginning, some are long for the cache."""
    stem = [rng.randrange(1, 2048) for _ in range(40)]
    prompts = [
        stem[: rng.randrange(0, 41)] + [rng.randrange(1, 2048) for _ in range(rng.randrange(1, 12))]
        for _ in range(rng.randrange(2, 7))
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randrange(1, 14), ignore_eos=rng.random() < 0.7) for _ in prompts
    ]
    return prompts, params


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def stress(engines: list[LLM]) -> tuple[int, int, int]:
    """(preemptions, tokens found in the prefix cache, drafts accepted) so far, in the engines of this process."""
    stats = [
        llm.engine_core._core.scheduler.make_stats() for llm in engines if isinstance(llm.engine_core, InprocClient)
    ]
    return (
        sum(s.num_preemptions for s in stats),
        sum(s.prefix_cache_hits for s in stats),
        sum(s.counts.get("spec_decode_num_accepted_tokens", 0) for s in stats),
    )


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.slow(keep="0")
def test_no_policy_changes_a_token(batch: int, engines: list[LLM], reference: LLM) -> None:
    rng, before = random.Random(batch), stress(engines)
    for _ in range(WORKLOADS // BATCHES):
        prompts, params = make_workload(rng)
        expected = tokens(reference, prompts, params)
        for i in rng.sample(range(len(engines)), ENGINES_PER_WORKLOAD):
            assert tokens(engines[i], prompts, params) == expected, COMBINATIONS[i]
    assert all(now > then for now, then in zip(stress(engines), before)), (
        "void: nothing was preempted, hit, or accepted"
    )
