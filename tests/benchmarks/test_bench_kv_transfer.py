"""What blocks that are kept elsewhere save: TTFT of a prompt whose blocks are in CPU memory, or in a folder, against computing it and against the prefix
cache, in one run, by the length of the prompt."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from pytest_benchmark.fixture import BenchmarkFixture

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

ROUNDS = 5
MODELS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "gpt2-tiny": ((32, 64, 128, 256, 480), {}),
    "gpt2": ((32, 64, 128, 256, 512, 960), {"load_format": "dummy", "dtype": "float32"}),
}
"""Model -> (tokens of prompts, its settings)."""


@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize("model", MODELS)
def test_time_to_first_token_from_elsewhere(
    benchmark: BenchmarkFixture, model: str, where: str, tmp_path: Path
) -> None:
    """Each round has prompts of its own. The files are in the operating system's cache: the disk is not measured."""
    lengths, settings = MODELS[model]
    extra: dict[str, Any] = {"max_read_seconds": 60}
    extra |= {"cpu_bytes_to_use": 500_000_000} if where == "memory" else {"shared_storage_path": str(tmp_path)}
    name = "OffloadingConnector" if where == "memory" else "SharedStorageConnector"
    transfer = {"kv_connector": name, "kv_connector_extra_config": extra}
    settings = settings | {"prefix_caching_hash_seed": "bench", "kv_cache_memory_bytes": 300_000_000}
    params, rng = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), random.Random(1)
    times: dict[tuple[str, int], list[float]] = {}
    with LLM(model, **settings, kv_transfer_config=transfer) as llm:
        core = llm.engine_core._core

        def ask(how: str, prompt: list[int]) -> int:
            started = time.perf_counter()
            [output] = llm.generate([prompt], params)
            times.setdefault((how, len(prompt)), []).append(time.perf_counter() - started)
            cached: int = output.num_cached_tokens
            return cached

        def forget() -> bool:
            """Once all blocks are copied."""
            if core.has_unfinished_requests:
                core.step()
            done: bool = llm.call("reset_prefix_cache")
            return done

        def in_three_ways() -> None:
            for length in lengths:
                prompt = [rng.randrange(400) for _ in range(length)]
                assert ask("computed", prompt) == 0
                wait_until(forget, "blocks are not copied")
                assert length - 16 <= ask(where, prompt) < length
                assert length - 16 <= ask("prefix_cache", prompt) < length

        benchmark.pedantic(in_three_ways, rounds=ROUNDS, warmup_rounds=1)
    medians = {key: statistics.median(seconds[1:]) for key, seconds in times.items()}
    for length in lengths:
        computed, found, cached = (medians[how, length] for how in ("computed", where, "prefix_cache"))
        benchmark.extra_info[f"{length} tokens"] = (
            f"computed {1e3 * computed:.1f} ms; computed / {where} {computed / found:.2f}, {where} / prefix cache {found / cached:.2f}"
        )
    gains = [length for length in lengths if medians[where, length] < medians["computed", length]]
    benchmark.extra_info["break_even"] = f"{where} is faster from {min(gains, default='no')} tokens on"
