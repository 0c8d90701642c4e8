"""What torch.compile makes of a step on a CPU: one stream and a long prompt of GPT-2's shape, by the level of `--compilation-config`, against plain torch and against
the native functions, in turns."""

from __future__ import annotations

import random
import statistics
import time
from contextlib import ExitStack
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

ROUNDS = 3
PLAIN: dict[str, Any] = {"linear_backend": "torch", "attention_backend": "torch"}
LEVELS: dict[str, dict[str, Any]] = {
    "native": {},
    "mode 0": PLAIN,
    "mode 1": PLAIN | {"compilation_config": {"mode": 1}},
    "mode 3": PLAIN | {"compilation_config": {"mode": 3}},
}
WORK = {"a prompt of 900": (900, 1), "16 tokens of one stream": (8, 16)}
"""Name -> (tokens of the prompt, tokens of the answer)."""


@pytest.mark.parametrize("model", ["gpt2"])
def test_compilation_levels(benchmark: BenchmarkFixture, model: str) -> None:
    """All engines at once, and each piece of work by one after the other. The first round warms up."""
    rng, times = random.Random(1), dict[tuple[str, str], list[float]]()
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory_bytes": 100_000_000}
    with ExitStack() as engines:
        llms = {}
        for level, more in LEVELS.items():
            started = time.perf_counter()
            llms[level] = engines.enter_context(LLM(model, **settings, **more))
            benchmark.extra_info[f"start, {level}"] = f"{time.perf_counter() - started:.1f} s"

        def in_turns() -> None:
            for work, (length, count) in WORK.items():
                prompt = [rng.randrange(400) for _ in range(length)]
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                for level, llm in llms.items():
                    started = time.perf_counter()
                    llm.generate([prompt], params)
                    times.setdefault((work, level), []).append(time.perf_counter() - started)

        benchmark.pedantic(in_turns, rounds=ROUNDS, warmup_rounds=1)
    for work in WORK:
        medians = {level: statistics.median(times[work, level][1:]) for level in LEVELS}
        ratios = ", ".join(f"{level} {medians['mode 0'] / medians[level]:.2f}" for level in LEVELS if level != "mode 0")
        benchmark.extra_info[work] = f"mode 0 {1e3 * medians['mode 0']:.0f} ms; so many times as fast: {ratios}"
