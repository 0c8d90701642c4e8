"""`stages bench startup`: from nothing to an engine that can answer (vllm/benchmarks/startup.py).

Cold: with an empty folder for compiled kernels (Triton, TorchInductor). Warm: with the user's own. On a CPU nothing is compiled,
and the two differ only by chance. Files in the operating system's cache stay there.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stage01_cli.bench.offline import OfflineBenchmark, at_least, engine, offline_engine, percentiles, print_times
from stage03_engine.config import VllmConfig, option

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class StartupArgs:
    """How often."""

    num_iters_cold: int = option(3, "starts with empty caches")
    num_iters_warmup: int = option(1, "starts that fill the caches, not timed")
    num_iters_warm: int = option(3, "starts with full caches")


class StartupBenchmark(OfflineBenchmark):
    """Start the engine process, wait until it is ready, end it, again and again."""

    sections = (StartupArgs,)

    def measure(self, config: VllmConfig, sections: list[Any]) -> dict[str, Any]:
        """Raises StagesError."""
        [bench] = sections
        at_least(bench, num_iters_cold=1, num_iters_warmup=0, num_iters_warm=1)
        from tqdm import trange

        offline_engine()  # what this process imports is not part of the engine's start
        with _empty_caches():
            cold = [_start(config) for _ in trange(bench.num_iters_cold, desc="cold", disable=None)]
        for _ in trange(bench.num_iters_warmup, desc="warm-up", disable=None):
            _start(config)
        warm = [_start(config) for _ in trange(bench.num_iters_warm, desc="warm", disable=None)]
        print_times("seconds to start, cold", cold)
        print_times("seconds to start, warm", warm)
        return {
            "avg_cold_startup_time": sum(cold) / len(cold), "cold_startup_times": cold,
            "cold_startup_percentiles": percentiles(cold), "avg_warm_startup_time": sum(warm) / len(warm),
            "warm_startup_times": warm, "warm_startup_percentiles": percentiles(warm),
        }  # fmt: skip


def _start(config: VllmConfig) -> float:
    """Seconds until the engine process has its weights, its cache and its first model run."""
    began = time.perf_counter()
    with engine(config):
        return time.perf_counter() - began


@contextmanager
def _empty_caches() -> Iterator[None]:
    """The engine process inherits the environment, and compiles into a folder of its own."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="stages-cold-") as folder:
        os.environ.update({name: os.path.join(folder, name) for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
