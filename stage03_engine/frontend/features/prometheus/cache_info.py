"""The metric `vllm:cache_config_info` (vllm/v1/metrics/loggers.py, log_metrics_info; v1/core/kv_cache_utils.py, get_kv_cache_capacity)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.async_llm import AsyncLLM

SETTINGS = (
    "block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override",
    "swap_space",
)  # fmt: skip


def capacity(config: VllmConfig, num_gpu_blocks: int) -> Mapping[str, object]:
    """What an engine with so many blocks has room for: requests of full length, and their tokens."""
    concurrency = num_gpu_blocks / math.ceil(config.max_model_len / config.cache_config.block_size)
    return {
        "num_gpu_blocks": num_gpu_blocks,
        "kv_cache_size_tokens": int(concurrency * config.max_model_len),
        "kv_cache_max_concurrency": concurrency,
    }


class CacheConfigInfo(Collector):
    """An info metric: always 1, and its labels are the settings of the KV cache and, once an engine is ready, its size."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """A sample for each engine that has said how many blocks it has."""
        config, cache = self._engine.vllm_config, self._engine.vllm_config.cache_config
        settings = {name: getattr(cache, name) for name in SETTINGS if hasattr(cache, name)} | {"cache_dtype": "auto"}
        names = [*settings, *capacity(config, 0), "engine"]
        metric = GaugeMetricFamily("vllm:cache_config_info", "Settings and size of the KV cache.", labels=names)
        for index, num_blocks in self._blocks().items():
            labels = [*settings.values(), *capacity(config, num_blocks).values(), index]
            metric.add_metric(list(map(str, labels)), 1)
        yield metric

    def _blocks(self) -> Mapping[int, int]:
        """Engine -> blocks. A client of several engines knows; of one, it is what the engine said when it was ready."""
        ready = self._engine.ready
        if ready is None:
            return {}
        return getattr(self._engine.engine_core, "num_gpu_blocks", {0: ready.num_gpu_blocks})


def install(app: Any, services: Any) -> None:
    """Add it to the metrics of a server (stage02_server's Services)."""
    services.registry.register(CacheConfigInfo(services.engine))
