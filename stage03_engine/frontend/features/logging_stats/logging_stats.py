"""The log's lines with statistics (vllm/v1/metrics/loggers.py, LoggingStatLogger)."""

from __future__ import annotations

import asyncio
import logging

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.metrics import IterationStats, StatLogger
from stage03_engine.messages import SchedulerStats

logger = logging.getLogger(__name__)


class LoggingStatLogger(StatLogger):
    """Writes a log line for each engine every ten seconds (`--log-stats-interval`) while it has work, and a last one when it has none."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._engines: dict[int, _EngineLine] = {}

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, engine_index: int = 0) -> None:
        if engine_index not in self._engines:
            self._engines[engine_index] = _EngineLine(self._config, engine_index)
        self._engines[engine_index].record(scheduler, iteration)

    def log(self) -> None:
        """Write the lines about the time since the last ones."""
        for _, engine in sorted(self._engines.items()):
            engine.log()


class _EngineLine:
    """The line of one engine. Its timer starts with the first step after a rest, so that a line is about the time in which the
    engine worked."""

    def __init__(self, config: VllmConfig, engine_index: int) -> None:
        self._index = engine_index
        self._interval = config.observability_config.log_stats_interval
        self._timer: asyncio.TimerHandle | None = None
        self._now, self._seen = SchedulerStats(), SchedulerStats()
        self._prompt_tokens = self._generation_tokens = 0
        self._hit_rate = 0.0

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Add the numbers of one step."""
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens
        self._now = scheduler or self._now
        if self._timer is None and self._is_active():
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)

    def _is_active(self) -> bool:
        return bool(self._prompt_tokens + self._generation_tokens + self._now.num_running + self._now.num_waiting)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval, self._tick) if self._is_active() else None
        self.log()

    def log(self) -> None:
        """Write the line about the time since the last one."""
        now, seen = self._now, self._seen
        if queries := now.prefix_cache_queries - seen.prefix_cache_queries:
            self._hit_rate = (now.prefix_cache_hits - seen.prefix_cache_hits) / queries
        logger.info(
            "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%, Preemptions: %d",
            self._index, self._prompt_tokens / self._interval, self._generation_tokens / self._interval, now.num_running,
            now.num_waiting, 100 * now.kv_cache_usage, 100 * self._hit_rate, now.num_preemptions - seen.num_preemptions,
        )  # fmt: skip
        self._seen, self._prompt_tokens, self._generation_tokens = now, 0, 0
