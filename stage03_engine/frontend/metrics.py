"""Where the statistics go: a periodic log line, and Prometheus (vllm/v1/metrics/loggers.py, with its metric names)."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.request_metrics import RequestMetrics, token_buckets
from stage03_engine.frontend.stats import IterationStats
from stage03_engine.messages import SchedulerStats

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0
_TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_ITL_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
_REQUEST_BUCKETS = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
)


class StatLogger(ABC):
    """Receives the numbers of every engine step."""

    @abstractmethod
    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Take in one step."""

    def request_aborted(self) -> None:  # noqa: B027 - most loggers have nothing to say about it
        """A client left before its request ended."""


class LoggingStatLogger(StatLogger):
    """One line every ten seconds while there is something to say."""

    def __init__(self, config: VllmConfig) -> None:
        self._last_log = time.monotonic()
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens
        elapsed = iteration.now - self._last_log
        if elapsed < LOG_INTERVAL_SECONDS or scheduler is None:
            return
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f%% used, preemptions %d",
            self._prompt_tokens / elapsed, self._generation_tokens / elapsed, scheduler.num_running,
            scheduler.num_waiting, 100 * scheduler.kv_cache_usage, scheduler.num_preemptions,
        )  # fmt: skip
        self._last_log, self._prompt_tokens, self._generation_tokens = iteration.now, 0, 0


class PrometheusStatLogger(StatLogger):
    """vLLM's metric names and labels, in a registry of the caller's (so that two engines in one process do not collide)."""

    def __init__(self, config: VllmConfig, registry: CollectorRegistry, model_name: str) -> None:
        lengths = token_buckets(config.max_model_len)
        names, values = ["model_name", "engine"], {"model_name": model_name, "engine": "0"}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, names, registry=registry).labels(**values)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, names, registry=registry).labels(**values)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, names, registry=registry, buckets=buckets).labels(**values)

        self._running = gauge("vllm:num_requests_running", "Requests that get tokens in each step.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait for their first step or to resume.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1.")
        self._preemptions = counter("vllm:num_preemptions", "Preempted requests since the start.")
        self._spec = {
            "num_drafts": counter("vllm:spec_decode_num_drafts", "Steps in which a request had drafts."),
            "num_draft_tokens": counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified."),
            "num_accepted_tokens": counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that stood."),
        }
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", _ITL_BUCKETS)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Waiting before the first step.", _REQUEST_BUCKETS)
        self._prompt_len = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", lengths)
        self._output_len = histogram("vllm:request_generation_tokens", "Output tokens per request.", lengths)
        success = Counter(
            "vllm:request_success", "Requests that ended, by reason.", [*names, "finished_reason"], registry=registry
        )
        self._success = {
            reason: success.labels(**values, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error", "repetition")
        }
        self._cache_queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._requests = RequestMetrics(config, registry, values)
        self._seen = SchedulerStats()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        if scheduler is not None:
            self._running.set(scheduler.num_running)
            self._waiting.set(scheduler.num_waiting)
            self._kv_usage.set(scheduler.kv_cache_usage)
            self._preemptions.inc(scheduler.num_preemptions - self._seen.num_preemptions)
            self._cache_queries.inc(scheduler.prefix_cache_queries - self._seen.prefix_cache_queries)
            self._cache_hits.inc(scheduler.prefix_cache_hits - self._seen.prefix_cache_hits)
            for name, metric in self._spec.items():
                metric.inc(getattr(scheduler.spec_decoding, name) - getattr(self._seen.spec_decoding, name))
            self._seen = scheduler
        self._requests.record(iteration)
        self._prompt_tokens.inc(iteration.num_prompt_tokens)
        self._generation_tokens.inc(iteration.num_generation_tokens)
        for histogram, values in (
            (self._ttft, iteration.ttft), (self._itl, iteration.itl), (self._queue, iteration.queue_seconds),
        ):  # fmt: skip
            for value in values:
                histogram.observe(value)
        for request in iteration.finished:
            self._success[request.reason].inc()
            self._e2e.observe(request.e2e_seconds)
            self._prompt_len.observe(request.num_prompt_tokens)
            self._output_len.observe(request.num_output_tokens)

    def request_aborted(self) -> None:
        self._success["abort"].inc()
