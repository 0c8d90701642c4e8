"""Prometheus metrics about whole requests and steps (vllm/v1/metrics/loggers.py, with its names and buckets).

The intervals of a request: queue | prefill | decode, where prefill ends with the first token and inference is the last two
together.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.stats import FinishedStats, IterationStats

STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWER_BUCKETS = (1, 2, 5, 10, 20)
TPOT_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
INTERVAL_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip


def token_buckets(max_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_len`."""
    return tuple(d * 10**e for e in range(len(str(max_len))) for d in (1, 2, 5) if d * 10**e <= max_len)


class RequestMetrics:
    """What `PrometheusStatLogger` observes beside the state of the scheduler."""

    def __init__(self, config: VllmConfig, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._labels, self._registry = labels, registry
        lengths = token_buckets(config.max_model_len)
        add = self._histogram
        self._step_tokens = add("iteration_tokens_total", "Tokens of one step.", STEP_BUCKETS)
        self._tpot = add(
            "request_time_per_output_token_seconds", "Decode time by tokens after the first.", TPOT_BUCKETS
        )
        self._prefill = add("request_prefill_time_seconds", "First step to first token.", INTERVAL_BUCKETS)
        self._decode = add("request_decode_time_seconds", "First token to last token.", INTERVAL_BUCKETS)
        self._inference = add("request_inference_time_seconds", "First step to last token.", INTERVAL_BUCKETS)
        self._n = add("request_params_n", "The `n` of requests.", ANSWER_BUCKETS)
        self._max_tokens = add("request_params_max_tokens", "The `max_tokens` of requests.", lengths)
        self._longest = add("request_max_num_generation_tokens", "Tokens of a request's longest answer.", lengths)
        self._cache_config(config)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, list(self._labels), registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def _cache_config(self, config: VllmConfig) -> None:
        """An info metric: always 1, and its labels are the settings."""
        cache = config.cache_config
        labels = {
            name: str(getattr(cache, name))
            for name in ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes",
                         "num_gpu_blocks_override", "swap_space")
        } | {"engine": self._labels["engine"]}  # fmt: skip
        text = "Settings of the KV cache."
        Gauge("vllm:cache_config_info", text, list(labels), registry=self._registry).labels(**labels).set(1)

    def record(self, iteration: IterationStats) -> None:
        """Take in one step."""
        if iteration.num_prompt_tokens + iteration.num_generation_tokens:
            self._step_tokens.observe(iteration.num_prompt_tokens + iteration.num_generation_tokens)
        for request in iteration.finished:
            self._finished(request)
        for params in iteration.completed:
            self._n.observe(params.n)
            self._longest.observe(params.longest)
            if params.max_tokens is not None:
                self._max_tokens.observe(params.max_tokens)

    def _finished(self, request: FinishedStats) -> None:
        if request.num_output_tokens == 0:  # it ended before its first token: there are no intervals
            return
        self._prefill.observe(request.prefill_seconds)
        self._decode.observe(request.decode_seconds)
        self._inference.observe(request.prefill_seconds + request.decode_seconds)
        if request.num_output_tokens > 1:
            self._tpot.observe(request.decode_seconds / (request.num_output_tokens - 1))
