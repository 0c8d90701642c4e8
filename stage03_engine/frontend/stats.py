"""What happened in one engine step, as numbers for the stat loggers (vllm/v1/metrics/stats.py).

All times are seconds of time.monotonic(), taken in the front end: a client feels the queue and the sockets too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stage03_engine.messages import EngineCoreOutput, FinishReason


@dataclass
class RequestStats:
    """The history of one request."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    queue_seconds: float = 0.0


@dataclass
class FinishedStats:
    """The summary of one request that ended."""

    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    e2e_seconds: float
    prefill_seconds: float  # first step to first token, with the way through the sockets
    decode_seconds: float  # first to last token


@dataclass
class CompletedStats:
    """What one request of a caller asked for; with n its answers are several requests for the engine core."""

    n: int
    max_tokens: int | None
    longest: int  # tokens of its longest answer


@dataclass
class IterationStats:
    """What one step's outputs amounted to.

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

    def update(
        self, request: RequestStats, output: EngineCoreOutput, num_new_tokens: int, reason: FinishReason | None
    ) -> None:
        """Account for one request's output of this step."""
        self.num_generation_tokens += num_new_tokens
        if num_new_tokens and request.num_output_tokens == 0:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.ttft.append(self.now - request.arrival)
            request.first_token = self.now
            if output.queued_seconds is not None:
                request.queue_seconds = output.queued_seconds
                self.queue_seconds.append(output.queued_seconds)
        elif num_new_tokens:
            self.itl.append(self.now - request.last_token)
        if num_new_tokens:
            request.last_token = self.now
            request.num_output_tokens += num_new_tokens
        if (
            output.result is not None and "pooled" in output.result
        ):  # no token came, so nothing above has counted the prompt
            self.num_prompt_tokens += request.num_prompt_tokens
            self.queue_seconds += [] if output.queued_seconds is None else [output.queued_seconds]
        if reason is not None:
            self.finished.append(
                FinishedStats(
                    str(reason), request.num_prompt_tokens, request.num_output_tokens, self.now - request.arrival,
                    max(0.0, request.first_token - request.arrival - request.queue_seconds),
                    request.last_token - request.first_token,
                )
            )  # fmt: skip
