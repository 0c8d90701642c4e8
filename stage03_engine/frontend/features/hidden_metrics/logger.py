"""Metrics under names that vLLM has given up (vllm/v1/metrics/loggers.py, show_hidden_metrics)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.features.hidden_metrics.flags import parse_version
from stage03_engine.frontend.features.prometheus import TPOT_BUCKETS, SummedGauge
from stage03_engine.frontend.metrics import IterationStats, StatLogger
from stage03_engine.messages import SchedulerStats

GPU_NAMES, TPOT_NAME = (0, 10), (0, 11)
"""The last versions that showed the `gpu_...` names and `time_per_output_token_seconds`."""


class HiddenMetricsLogger(StatLogger):
    """Those that the version of `--show-hidden-metrics-for-version` still had."""

    def __init__(self, config: VllmConfig, registry: CollectorRegistry, model_name: str) -> None:
        version = parse_version(config.observability_config.show_hidden_metrics_for_version)
        names, values = ["model_name", "engine"], {"model_name": model_name, "engine": "0"}
        self._seen = SchedulerStats()
        self._usage: Gauge | None = None
        self._counters: dict[str, Counter] = {}
        self._tpot: Histogram | None = None
        if version <= GPU_NAMES:
            text = "Older name of vllm:kv_cache_usage_perc."
            self._usage = SummedGauge("vllm:gpu_cache_usage_perc", text, names, registry=registry).labels(**values)
            for name in ("prefix_cache_queries", "prefix_cache_hits"):
                counter = Counter(f"vllm:gpu_{name}", f"Older name of vllm:{name}.", names, registry=registry)
                self._counters[name] = counter.labels(**values)
        if version <= TPOT_NAME:
            name, text = "vllm:time_per_output_token_seconds", "Older name of vllm:inter_token_latency_seconds."
            self._tpot = Histogram(name, text, names, registry=registry, buckets=TPOT_BUCKETS).labels(**values)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        if scheduler is not None:
            if self._usage is not None:
                self._usage.set(scheduler.kv_cache_usage)
            for name, counter in self._counters.items():
                counter.inc(getattr(scheduler, name) - getattr(self._seen, name))
            self._seen = scheduler
        if self._tpot is not None:
            for seconds in iteration.itl:
                self._tpot.observe(seconds)
