"""What a caller of the engine receives (vllm/outputs.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stage03_engine.frontend.metrics import RequestStats
from stage03_engine.messages import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. With output kind DELTA the fields hold only what is new since the last output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string
    cumulative_logprob: float | None = None  # of all tokens so far; only with logprobs
    stats: RequestStats | None = None  # its history, once it has ended; none with beam search

    def append(self, new: CompletionOutput) -> None:
        """Add the next delta of the same sequence."""
        self.text += new.text
        self.token_ids = self.token_ids + new.token_ids
        if new.logprobs:
            self.logprobs = (self.logprobs or []) + new.logprobs
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        self.cumulative_logprob = new.cumulative_logprob
        self.stats = new.stats


@dataclass(slots=True)
class RequestOutput:
    """The state of one request as its caller sees it: one sequence, or with n > 1 each that has something new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one entry per prompt token, None for the first
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    result: dict[str, Any] | None = None  # what features add, by name (see messages.EngineCoreOutput)

    def add(self, newer: RequestOutput, aggregate: bool) -> None:
        """Merge a newer output of the same request that came before this one was read.

        With `aggregate` (DELTA) the newer one is appended; without (CUMULATIVE) it replaces this one. Nothing is lost.
        """
        self.finished = newer.finished
        self.prompt_logprobs = newer.prompt_logprobs or self.prompt_logprobs
        self.result = newer.result or self.result
        mine = {output.index: output for output in self.outputs}
        for new in newer.outputs:
            if aggregate and new.index in mine:
                mine[new.index].append(new)
            else:
                mine[new.index] = new
        self.outputs = list(mine.values())
