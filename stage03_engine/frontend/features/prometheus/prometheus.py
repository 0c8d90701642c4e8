"""The stat logger behind /metrics (vllm/v1/metrics/loggers.py PrometheusStatLogger, with vLLM's metric names and buckets)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.metrics import FinishedStats, IterationStats, StatLogger
from stage03_engine.messages import FinishReason, SchedulerStats
from stage03_engine.plugins import loaded

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
)  # fmt: skip
TPOT_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
LATENCY_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0
)  # fmt: skip
INTERVAL_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWER_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
SUMMED = {"multiprocess_mode": "livesum"}
"""How several API servers merge a gauge: by adding up, because only the first server hears from an engine's scheduler."""

CACHE_SETTINGS = (
    "block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override",
    "swap_space",
)  # fmt: skip


def token_buckets(max_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_len`."""
    return tuple(d * 10**e for e in range(len(str(max_len))) for d in (1, 2, 5) if d * 10**e <= max_len)


M = TypeVar("M", bound=MetricWrapperBase)


class Families:
    """The metrics of a registry, by name. Each is made once, and each engine has its own labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made: dict[str, Any] = {}

    def get(self, kind: type[M], name: str, text: str, labels: Mapping[str, str], **more: Any) -> M:
        """The metric with these labels."""
        if name not in self._made:
            self._made[name] = kind(name, text, list(labels), registry=self._registry, **more)
        return self._made[name].labels(**labels)


class PrometheusStatLogger(StatLogger):
    """vLLM's metric names and labels, in the caller's registry (so that two engines in one process do not collide)."""

    def __init__(self, config: VllmConfig, registry: CollectorRegistry, model_name: str) -> None:
        self._config, self._families, self._model_name = config, Families(registry), model_name
        several = getattr(config, "data_parallel_config", None)
        self._engines: dict[int, _EngineMetrics] = {}
        for index in (0,) if several is None else several.engine_indices:
            self._of(index)

    def _of(self, index: int) -> _EngineMetrics:
        """The metrics of one engine, made when its first numbers come: engines may be added later."""
        if index not in self._engines:
            self._engines[index] = _EngineMetrics(self._config, self._families, self._model_name, index)
        return self._engines[index]

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, engine_index: int = 0) -> None:
        self._of(engine_index).record(scheduler, iteration)

    def request_aborted(self, engine_index: int | None = None) -> None:
        """A request that no engine had yet counts for the first one."""
        (next(iter(self._engines.values())) if engine_index is None else self._of(engine_index)).request_aborted()


class _EngineMetrics:
    """The metrics of one engine."""

    def __init__(self, config: VllmConfig, families: Families, model_name: str, engine_index: int) -> None:
        lengths = token_buckets(config.max_model_len)
        values = {"model_name": model_name, "engine": str(engine_index)}

        def gauge(name: str, text: str) -> Gauge:
            return families.get(Gauge, f"vllm:{name}", text, values, **SUMMED)

        def counter(name: str, text: str) -> Counter:
            return families.get(Counter, f"vllm:{name}", text, values)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return families.get(Histogram, f"vllm:{name}", text, values, buckets=buckets)

        self._running = gauge("num_requests_running", "Requests that get tokens in each step.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for their first step or to resume.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1.")
        self._totals = {
            "num_preemptions": counter("num_preemptions", "Preempted requests since the start."),
            "prefix_cache_queries": counter("prefix_cache_queries", "Tokens looked up in the prefix cache."),
            "prefix_cache_hits": counter("prefix_cache_hits", "Tokens found in the prefix cache."),
        }
        counts = {name: text for each in loaded("counts") for name, text in each.items()}
        self._counts = {name: counter(name, text) for name, text in counts.items() if "{" not in name}
        self._families, self._values, self._labelled = families, values, counts
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._step_tokens = histogram("iteration_tokens_total", "Tokens of one step.", STEP_BUCKETS)
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a request.", ITL_BUCKETS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Decode time by tokens after the first.", TPOT_BUCKETS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "Waiting before the first step.", LATENCY_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "First step to first token.", INTERVAL_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "First token to last token.", INTERVAL_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", "First step to last token.", INTERVAL_BUCKETS)
        self._prompt_len = histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self._output_len = histogram("request_generation_tokens", "Output tokens per request.", lengths)
        self._n = histogram("request_params_n", "The `n` of requests.", ANSWER_BUCKETS)
        self._max_tokens = histogram("request_params_max_tokens", "The `max_tokens` of requests.", lengths)
        self._longest = histogram("request_max_num_generation_tokens", "Tokens of a request's longest answer.", lengths)
        self._preemptions = histogram("request_num_preemptions", "Preemptions per request.", PREEMPTION_BUCKETS)
        self._add_reasons(families, values)
        self._seen = SchedulerStats()

    def _add_reasons(self, families: Families, values: dict[str, str]) -> None:
        """The metrics that have a label more, with each of its values from the start."""
        name = "vllm:num_requests_waiting_by_reason"
        text = "Of those that wait: for room (capacity), or until they are ready (deferred)."
        self._waiting_by_reason = {
            reason: families.get(Gauge, name, text, values | {"reason": reason}, **SUMMED)
            for reason in ("capacity", "deferred")
        }
        name, text = "vllm:request_success", "Requests that ended, by reason."
        self._success = {
            str(reason): families.get(Counter, name, text, values | {"finished_reason": str(reason)})
            for reason in FinishReason
        }

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Add the numbers of one step."""
        if scheduler is not None:
            self._record_scheduler(scheduler)
        self._prompt_tokens.inc(iteration.num_prompt_tokens)
        self._generation_tokens.inc(iteration.num_generation_tokens)
        if iteration.num_prompt_tokens + iteration.num_generation_tokens:
            self._step_tokens.observe(iteration.num_prompt_tokens + iteration.num_generation_tokens)
        for histogram, values in (
            (self._ttft, iteration.ttft), (self._itl, iteration.itl), (self._queue, iteration.queue_seconds),
        ):  # fmt: skip
            for value in values:
                histogram.observe(value)
        for request in iteration.finished:
            self._record_finished(request)
        for completed in iteration.completed:
            self._n.observe(completed.n)
            self._longest.observe(completed.longest)
            if completed.max_tokens is not None:
                self._max_tokens.observe(completed.max_tokens)

    def _record_scheduler(self, now: SchedulerStats) -> None:
        """The scheduler counts since its start; a Counter takes what is new. Most steps change little, and a metric takes a lock."""
        seen, self._seen = self._seen, now
        if now.num_running != seen.num_running:
            self._running.set(now.num_running)
        if (now.num_waiting, now.num_deferred) != (seen.num_waiting, seen.num_deferred):
            self._waiting.set(now.num_waiting)
            self._waiting_by_reason["capacity"].set(now.num_waiting - now.num_deferred)
            self._waiting_by_reason["deferred"].set(now.num_deferred)
        if now.kv_cache_usage != seen.kv_cache_usage:
            self._kv_usage.set(now.kv_cache_usage)
        for name, metric in self._totals.items():
            if more := getattr(now, name) - getattr(seen, name):
                metric.inc(more)
        if now.counts != seen.counts:
            for name in now.counts.keys() - self._counts.keys():
                self._counts[name] = self._with_label(name)
            for name, metric in self._counts.items():
                metric.inc(now.counts.get(name, 0) - seen.counts.get(name, 0))

    def _with_label(self, count: str) -> Counter:
        """`name{value}` is one of those that a feature declares as `name{label}`."""
        name, value = count.removesuffix("}").split("{")
        declared = next(each for each in self._labelled if each.startswith(name + "{"))
        label = declared.removesuffix("}").split("{")[1]
        return self._families.get(Counter, f"vllm:{name}", self._labelled[declared], self._values | {label: value})

    def _record_finished(self, request: FinishedStats) -> None:
        self._success[request.reason].inc()
        self._e2e.observe(request.e2e_seconds)
        self._prompt_len.observe(request.num_prompt_tokens)
        self._output_len.observe(request.num_output_tokens)
        self._preemptions.observe(request.num_preemptions)
        if request.num_output_tokens == 0:  # it ended before its first token: there are no intervals
            return
        self._prefill.observe(request.prefill_seconds)
        self._decode.observe(request.decode_seconds)
        self._inference.observe(request.prefill_seconds + request.decode_seconds)
        if request.num_output_tokens > 1:
            self._tpot.observe(request.decode_seconds / (request.num_output_tokens - 1))

    def request_aborted(self) -> None:
        """A client left before its request ended."""
        self._success["abort"].inc()


def capacity(config: VllmConfig, num_gpu_blocks: int) -> Mapping[str, object]:
    """What an engine with so many blocks has room for: requests of full length, and their tokens (vLLM: get_kv_cache_capacity)."""
    concurrency = num_gpu_blocks / math.ceil(config.max_model_len / config.cache_config.block_size)
    return {
        "num_gpu_blocks": num_gpu_blocks,
        "kv_cache_size_tokens": int(concurrency * config.max_model_len),
        "kv_cache_max_concurrency": concurrency,
    }


class CacheConfigInfo(Collector):
    """The metric `vllm:cache_config_info`: always 1, and its labels are the settings of the KV cache and, once an engine is ready, its size."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """A sample for each engine that has said how many blocks it has."""
        config, cache = self._engine.vllm_config, self._engine.vllm_config.cache_config
        settings = {name: getattr(cache, name) for name in CACHE_SETTINGS if hasattr(cache, name)} | {
            "cache_dtype": getattr(cache, "kv_cache_dtype", "auto")
        }
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
        parallel = getattr(self._engine.vllm_config, "data_parallel_config", None)  # of a feature
        [only, *_] = getattr(parallel, "engine_indices", (0,))
        return getattr(self._engine.engine_core, "num_gpu_blocks", {only: ready.num_gpu_blocks})


def install(app: Any, services: Any) -> None:
    """Add it to the metrics of a server (stage02_server's Services)."""
    services.registry.register(CacheConfigInfo(services.engine))
