"""What a folder of KV-cache blocks saves: TTFT of a prompt whose blocks are there, against computing it and against the prefix cache, in one run."""

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
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2-tiny": (480, {}),
    "gpt2": (960, {"load_format": "dummy", "dtype": "float32"}),
}
"""Model -> (tokens of a prompt, its settings)."""


@pytest.mark.parametrize("model", MODELS)
def test_time_to_first_token_from_a_folder(benchmark: BenchmarkFixture, model: str, tmp_path: Path) -> None:
    """Each round has a prompt of its own. The files are in the operating system's cache: the disk is not measured."""
    length, settings = MODELS[model]
    extra = {"shared_storage_path": str(tmp_path), "max_read_seconds": 60}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    settings = settings | {"prefix_caching_hash_seed": "bench", "kv_cache_memory_bytes": 300_000_000}
    params, rng = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), random.Random(1)
    times: dict[str, list[float]] = {"computed": [], "folder": [], "prefix_cache": []}
    with LLM(model, **settings, kv_transfer_config=transfer) as llm:
        core = llm.engine_core._core

        def ask(how: str, prompt: list[int]) -> int:
            started = time.perf_counter()
            [output] = llm.generate([prompt], params)
            times[how].append(time.perf_counter() - started)
            cached: int = output.num_cached_tokens
            return cached

        def forget() -> bool:
            """Once all blocks are written."""
            if core.has_unfinished_requests:
                core.step()
            done: bool = llm.call("reset_prefix_cache")
            return done

        def in_three_ways() -> None:
            prompt = [rng.randrange(400) for _ in range(length)]
            assert ask("computed", prompt) == 0
            wait_until(forget, "blocks are not written")
            assert length - 16 <= ask("folder", prompt) < length
            assert length - 16 <= ask("prefix_cache", prompt) < length

        benchmark.pedantic(in_three_ways, rounds=ROUNDS, warmup_rounds=1)
    for how, seconds in times.items():
        benchmark.extra_info[f"ttft_ms_{how}"] = round(1e3 * statistics.median(seconds[1:]), 1)
    computed, found, cached = (statistics.median(seconds[1:]) for seconds in times.values())
    benchmark.extra_info["computed_through_folder"] = round(computed / found, 2)
    benchmark.extra_info["folder_through_prefix_cache"] = round(found / cached, 2)
