"""Metrics under names that vLLM has given up (vllm/v1/metrics/loggers.py, show_hidden_metrics)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.features.hidden_metrics.manifest import parse_version
from stage03_engine.frontend.features.prometheus.prometheus import SUMMED, TPOT_BUCKETS, Families
from stage03_engine.frontend.metrics import IterationStats, StatLogger
from stage03_engine.messages import SchedulerStats

GPU_NAMES, TPOT_NAME = (0, 10), (0, 11)
"""The last versions that showed the `gpu_...` names and `time_per_output_token_seconds`."""


class HiddenMetricsLogger(StatLogger):
    """Those that the version of `--show-hidden-metrics-for-version` still had."""

    def __init__(self, config: VllmConfig, families: Families, labels: dict[str, str]) -> None:
        version = parse_version(config.observability_config.show_hidden_metrics_for_version)
        self._seen = SchedulerStats()
        self._usage: Gauge | None = None
        self._counters: dict[str, Counter] = {}
        self._tpot: Histogram | None = None
        if version <= GPU_NAMES:
            text = "Older name of vllm:kv_cache_usage_perc."
            self._usage = families.get(Gauge, "vllm:gpu_cache_usage_perc", text, labels, **SUMMED)
            for name in ("prefix_cache_queries", "prefix_cache_hits"):
                text = f"Older name of vllm:{name}."
                self._counters[name] = families.get(Counter, f"vllm:gpu_{name}", text, labels)
        if version <= TPOT_NAME:
            name, text = "vllm:time_per_output_token_seconds", "Older name of vllm:inter_token_latency_seconds."
            self._tpot = families.get(Histogram, name, text, labels, buckets=TPOT_BUCKETS)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, engine_index: int = 0) -> None:
        if scheduler is not None:
            if self._usage is not None:
                self._usage.set(scheduler.kv_cache_usage)
            for name, counter in self._counters.items():
                counter.inc(getattr(scheduler, name) - getattr(self._seen, name))
            self._seen = scheduler
        if self._tpot is not None:
            for seconds in iteration.itl:
                self._tpot.observe(seconds)
