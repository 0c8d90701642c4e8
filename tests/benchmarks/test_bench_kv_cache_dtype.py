"""What a KV cache of 8 bits does to the speed of decode steps over long contexts: against the full cache, in one run."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

ROUNDS, REQUESTS = 5, 16
FORMATS = ("auto", "fp8", "int8")
MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gpt2-tiny": (440, 64, {}),
    "gpt2": (960, 32, {"load_format": "dummy"}),
}
"""Model -> (tokens of a prompt, tokens of an answer, its settings)."""


@pytest.mark.parametrize("model", MODELS)
def test_decoding_over_long_contexts(benchmark: BenchmarkFixture, model: str) -> None:
    """The prompts are in the prefix cache, so that what is measured is the answers. The formats take turns."""
    length, answer, settings = MODELS[model]
    settings = {"kv_cache_memory_bytes": 1_500_000_000, "dtype": "float32", "device": "cpu"} | settings
    rng = random.Random(1)
    prompts = [[rng.randrange(400) for _ in range(length)] for _ in range(REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(LLM(model, kv_cache_dtype=name, **settings)) for name in FORMATS}

        def in_turn() -> None:
            for name, llm in engines.items():
                started = time.perf_counter()
                llm.generate(prompts, params)  # type: ignore[arg-type]
                seconds[name].append(time.perf_counter() - started)

        benchmark.pedantic(in_turn, rounds=ROUNDS, warmup_rounds=1)
    for name, found in seconds.items():
        benchmark.extra_info[f"tokens_per_s_{name}"] = round(REQUESTS * answer / median(found[1:]))
        benchmark.extra_info[f"times_auto_{name}"] = round(median(seconds["auto"][1:]) / median(found[1:]), 2)
