"""Statistics of requests: counted per engine step, then handed to stat loggers, which are features, for the log and for Prometheus.

All times are seconds of time.monotonic(), measured in the front end: they include the queue and the sockets, as a client
sees them. A request's intervals are queue | prefill | decode; prefill ends with the first token, inference is both.
Source: vllm/v1/metrics/stats.py and loggers.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stage03_engine.config import VllmConfig
from stage03_engine.messages import EngineCoreOutput, FinishReason, SchedulerStats
from stage03_engine.plugins import loaded, wanted


@dataclass
class RequestStats:
    """The history of one request."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    queue_seconds: float = 0.0
    num_preemptions: int = 0


@dataclass
class FinishedStats:
    """The summary of one finished request."""

    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    e2e_seconds: float
    prefill_seconds: float  # first step to first token, sockets included
    decode_seconds: float  # first to last token
    num_preemptions: int = 0


@dataclass
class CompletedStats:
    """A caller's request; with n above 1 it is `parts` requests for the engine core."""

    n: int
    max_tokens: int | None
    parts: int = 1  # those that still run
    longest: int = 0  # tokens of the longest answer that has ended


@dataclass
class IterationStats:
    """The numbers of one engine step.

    ttft: time to first token, per request that got its first one; itl: inter-token latency, per request that got another.
    """

    now: float = field(default_factory=time.monotonic)
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    queue_seconds: list[float] = field(default_factory=list)
    finished: list[FinishedStats] = field(default_factory=list)
    completed: list[CompletedStats] = field(default_factory=list)

    def update(self, request: RequestStats, output: EngineCoreOutput, reason: FinishReason | None) -> None:
        """Count one request's output of this step; `reason` is why it ends, if it ends."""
        num_new_tokens, request.num_preemptions = len(output.new_token_ids), output.num_preemptions
        if num_new_tokens:
            self._count_tokens(request, num_new_tokens, output.queued_seconds)
        elif output.result is not None:  # no token came, so nothing else counts the prompt
            self.num_prompt_tokens += request.num_prompt_tokens
            self.queue_seconds += [] if output.queued_seconds is None else [output.queued_seconds]
        if reason is not None:
            self.finished.append(
                FinishedStats(
                    str(reason), request.num_prompt_tokens, request.num_output_tokens, self.now - request.arrival,
                    max(0.0, request.first_token - request.arrival - request.queue_seconds),
                    request.last_token - request.first_token, request.num_preemptions,
                )
            )  # fmt: skip

    def complete(self, request: CompletedStats, num_output_tokens: int) -> None:
        """One part of a caller's request ended; the last one counts the whole."""
        request.longest = max(request.longest, num_output_tokens)
        request.parts -= 1
        if request.parts == 0:
            self.completed.append(request)

    def _count_tokens(self, request: RequestStats, num_new_tokens: int, queued_seconds: float | None) -> None:
        self.num_generation_tokens += num_new_tokens
        if request.num_output_tokens == 0:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.ttft.append(self.now - request.arrival)
            request.first_token = self.now
            if queued_seconds is not None:
                request.queue_seconds = queued_seconds
                self.queue_seconds.append(queued_seconds)
        else:
            self.itl.append(self.now - request.last_token)
        request.last_token = self.now
        request.num_output_tokens += num_new_tokens


class StatLogger(ABC):
    """Receives the numbers of every engine step."""

    @abstractmethod
    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, engine_index: int = 0) -> None:
        """Add the numbers of one step of this engine."""

    def engine_ready(self) -> None:  # noqa: B027 - most loggers begin with the first numbers
        """The engine can serve."""

    def request_aborted(self, engine_index: int | None = None) -> None:  # noqa: B027 - most loggers ignore it
        """A client left before its request ended, which this engine had; None if there is one engine."""


StatLoggers: TypeAlias = Sequence[StatLogger | Callable[[VllmConfig, int], object]]
"""A function makes a user's own logger for an engine with this number (vLLM: StatLoggerFactory)."""


def make_stat_loggers(config: VllmConfig, given: StatLoggers | None = None) -> list[StatLogger]:
    """Those given, as loggers; else those of packages, and the one that writes to the log, unless --disable-log-stats. Raises ConfigError."""
    if given is None:
        silent = config.observability_config.disable_log_stats
        return [kind(config) for kind in (*loaded("stats", "package"), *(() if silent else loaded("stats", "engine")))]
    made = [each for each in given if isinstance(each, StatLogger)]
    if len(made) < len(given):
        made = wanted("engine", "own_stat_loggers", "a stat logger of your own")(config, given)
    return made
