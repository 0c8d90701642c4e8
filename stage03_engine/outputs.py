"""What a caller of the engine receives (vllm/outputs.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from stage03_engine.messages import TokenLogprobs


@dataclass
class CompletionOutput:
    """One generated sequence. With output kind DELTA the fields hold only what is new since the last output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string


@dataclass
class RequestOutput:
    """The state of one request, seen by whoever asked."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    def add(self, newer: RequestOutput, aggregate: bool) -> None:
        """Take in a newer output of the same request that came before this one was read.

        aggregate True (DELTA): append; False (CUMULATIVE): the newer one replaces. Nothing is ever lost.
        """
        self.finished = newer.finished
        if not aggregate:
            self.outputs = newer.outputs
            return
        mine, new = self.outputs[0], newer.outputs[0]
        mine.text += new.text
        mine.token_ids = mine.token_ids + new.token_ids
        if new.logprobs:
            mine.logprobs = (mine.logprobs or []) + new.logprobs
        mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason
