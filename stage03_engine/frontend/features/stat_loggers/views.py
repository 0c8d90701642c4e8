"""The numbers of a step under vLLM's names, for loggers that were written for it (vllm/v1/metrics/stats.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from stage03_engine.frontend.metrics import FinishedStats, IterationStats
from stage03_engine.messages import SchedulerStats


@dataclass
class PrefixCacheStats:
    """Of one step, in tokens."""

    queries: int
    hits: int


@dataclass
class StepOfScheduler:
    """vLLM: SchedulerStats."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float  # 0 to 1
    prefix_cache_stats: PrefixCacheStats


@dataclass
class FinishedRequestStats:
    """One request that ended; times in seconds."""

    finish_reason: str
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    queued_time: float
    prefill_time: float
    decode_time: float
    inference_time: float
    mean_time_per_output_token: float

    @classmethod
    def of(cls, request: FinishedStats) -> FinishedRequestStats:
        """What is known of it here."""
        inference = request.prefill_seconds + request.decode_seconds
        later = request.num_output_tokens - 1
        return cls(
            request.reason, request.e2e_seconds, request.num_prompt_tokens, request.num_output_tokens,
            max(0.0, request.e2e_seconds - inference), request.prefill_seconds, request.decode_seconds, inference,
            request.decode_seconds / later if later > 0 else 0.0,
        )  # fmt: skip


@dataclass
class StepOfIteration:
    """vLLM: IterationStats."""

    iteration_timestamp: float  # time.time()
    num_prompt_tokens: int
    num_generation_tokens: int
    num_preempted_reqs: int
    time_to_first_tokens_iter: list[float]
    inter_token_latencies_iter: list[float]
    finished_requests: list[FinishedRequestStats]
    n_params_iter: list[int]
    max_num_generation_tokens_iter: list[int]

    @classmethod
    def of(cls, step: IterationStats, totals: Totals) -> StepOfIteration:
        """`totals` has the scheduler's part of the same step already."""
        return cls(
            time.time(), step.num_prompt_tokens, step.num_generation_tokens, totals.num_preempted, step.ttft, step.itl,
            [FinishedRequestStats.of(each) for each in step.finished], [each.n for each in step.completed],
            [each.longest for each in step.completed],
        )  # fmt: skip


class Totals:
    """The scheduler counts since its start, and vLLM's loggers expect what is new."""

    def __init__(self) -> None:
        self._seen = SchedulerStats()
        self.num_preempted = 0  # in the last step

    def step(self, now: SchedulerStats) -> StepOfScheduler:
        """The next step."""
        seen, self._seen = self._seen, now
        self.num_preempted = now.num_preemptions - seen.num_preemptions
        queries = now.prefix_cache_queries - seen.prefix_cache_queries
        hits = now.prefix_cache_hits - seen.prefix_cache_hits
        return StepOfScheduler(now.num_running, now.num_waiting, now.kv_cache_usage, PrefixCacheStats(queries, hits))
