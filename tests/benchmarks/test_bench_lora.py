"""What adapters cost in a batch, as ratios within one run: none, one for all requests, and another one for each."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture
from small_adapters import write_adapter

from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams

REQUESTS, TOKENS = 8, 48
PROMPTS: list[list[int]] = [[number + 5] for number in range(REQUESTS)]


def test_a_batch_with_adapters(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Eight requests at once, turn and turn about; `off` is an engine without --enable-lora."""
    modules = tuple(
        f"a{n}={write_adapter(tmp_path / str(n), BUNDLED_FOLDER / 'gpt2-tiny', n)}" for n in range(REQUESTS)
    )
    common = {"kv_cache_memory_bytes": 50_000_000, "enable_prefix_caching": False}
    more = {"enable_lora": True, "lora_modules": modules, "max_loras": REQUESTS, "max_lora_rank": 8}

    def params(name: str | None) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, lora=name)

    with LLM("gpt2-tiny", **common) as plain, LLM("gpt2-tiny", **common, **more) as llm:
        cases: dict[str, tuple[LLM, list[SamplingParams]]] = {
            "off": (plain, [params(None)] * REQUESTS),
            "0": (llm, [params(None)] * REQUESTS),
            "1": (llm, [params("a0")] * REQUESTS),
            "8": (llm, [params(f"a{number}") for number in range(REQUESTS)]),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for round_ in range(6):
            for name, (engine, asked) in cases.items():
                started = time.perf_counter()
                engine.generate(PROMPTS, asked)  # type: ignore[arg-type]
                if round_:  # the first one warms up
                    times[name].append(time.perf_counter() - started)
        benchmark.pedantic(lambda: llm.generate(PROMPTS, cases["8"][1]), rounds=3)  # type: ignore[arg-type]
    base = statistics.median(times["off"])
    for name, seconds in times.items():
        benchmark.extra_info[f"tokens_per_second_{name}"] = round(REQUESTS * TOKENS / statistics.median(seconds))
        benchmark.extra_info[f"time_against_off_{name}"] = round(statistics.median(seconds) / base, 2)
