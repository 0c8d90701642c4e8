"""A request inside the engine core, and the queue it waits or runs in (vllm/v1/request.py, vllm/v1/core/sched/request_queue.py)."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from stagetrace import trace


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> (PREEMPTED -> RUNNING)* -> FINISHED."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """The tokens of one request and how many of them have been computed.

    There is no prefill phase and no decode phase. A request has `num_tokens` tokens (prompt and output so far), of which
    `num_computed_tokens` have their keys and values in the KV cache; the scheduler lets the second number catch up with
    the first. When it has caught up, the last row of logits gives one more token.
    """

    def __init__(self, message: EngineCoreRequest, seed: int) -> None:
        self.arrival = 0  # its number in the order of arrival, given by the scheduler
        self.priority = message.priority  # a smaller number goes first, under the priority policy
        self.cache_salt, self.tenant = message.cache_salt, message.tenant
        self.hash_keys: tuple[str, ...] = ()  # what else its keys and values depend on (`add_hash_key`)
        self.block_hashes: list[bytes] = []  # one per full block of all_token_ids, computed when needed
        self.num_traced_hashes = 0  # of them, those that a trace holds
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # found in the prefix cache when it was first admitted
        self.request_id = message.request_id
        self.sampling_params = message.sampling_params
        self.task = message.task
        self.seed = seed  # the client's, or one of the engine's own
        self.eos_token_id = message.eos_token_id
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.all_token_ids = list(message.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens  # prompt and output so far: the length of all_token_ids
        self.spec_token_ids: list[int] = []  # drafts of what comes next, to be verified
        self.num_computed_tokens = 0
        self.skip_reading_prefix_cache = False  # True while it needs more of its prompt than keys and values
        self.status = RequestStatus.WAITING
        self.queued_at: float | None = None  # time.monotonic() of its arrival, until it is first scheduled
        self.queued_seconds: float | None = None  # how long it waited, until an output says so

    def add_hash_key(self, key: str) -> None:
        """Its keys and values depend on this too: only requests with the same key find its blocks. Before any block is hashed."""
        assert not self.block_hashes, f"{key} comes after the blocks of {self.request_id} were looked up"
        self.hash_keys += (key,)

    @property
    def num_output_tokens(self) -> int:
        """Output so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def traced_params(self) -> dict[str, Any]:
        """What the scheduler reads, for the trace: enough for a replay to decide again. Stop token ids only with
        --trace-prompts."""
        params = self.sampling_params
        return {
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(params.stop_token_ids) if trace.prompts else [],
            "eos_token_id": self.eos_token_id,
            "priority": self.priority,
        } | ({} if self.tenant is None else {"tenant": self.tenant})

    def append_output_tokens(self, token_ids: list[int], max_model_len: int) -> EngineCoreOutput:
        """Append what a step sampled, up to the first token that ends the request; the rest is dropped."""
        output = EngineCoreOutput(self.request_id, token_ids, queued_seconds=self.queued_seconds)
        output.num_cached_tokens, output.num_preemptions = self.num_cached_tokens, self.num_preemptions
        self.queued_seconds = None
        for count, token_id in enumerate(token_ids, start=1):
            self.all_token_ids.append(token_id)
            self.num_tokens += 1
            stop = check_stop(self, max_model_len)
            if stop is not None:
                output.new_token_ids, (output.finish_reason, output.stop_reason) = token_ids[:count], stop
                break
        return output


def check_stop(request: Request, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """Does the newest token end the request? Returns (reason, the stop token id if the request named it), or None.

    A stop token wins over the length limit, as the text would have ended there anyway (vllm/v1/core/sched/utils.py).
    """
    params, last, num_tokens = request.sampling_params, request.all_token_ids[-1], request.num_tokens
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens < params.min_tokens and num_tokens < max_model_len:
        return None  # such a token cannot be sampled yet, and a drafted or forced one must not end the request either
    if last == request.eos_token_id and not params.ignore_eos:
        return FinishReason.STOP, None
    if last in params.stop_token_ids:
        return FinishReason.STOP, last
    if num_tokens >= max_model_len or num_output_tokens >= (params.max_tokens or max_model_len):
        return FinishReason.LENGTH, None
    return None


POLICIES: dict[str, Callable[[Request], tuple[int, ...]]] = {
    "fcfs": lambda request: (request.arrival,),
    "priority": lambda request: (request.priority, request.arrival),
}
"""Scheduling policy -> sort key: the smallest goes first. Arrival breaks every tie, so no two keys are equal."""


class RequestQueue(list[Request]):
    """Requests in the order of a policy: a list that is kept sorted.

    A preempted request goes back to its place by key; under `fcfs` that is the front, because all that wait arrived later.
    A sorted list beats a heap: it can be iterated, indexed and searched.
    """

    def __init__(self, policy: str) -> None:
        super().__init__()
        self._key = POLICIES[policy]

    def add(self, request: Request) -> None:
        """Insert at its place by the policy."""
        insort(self, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is: thousands may wait and be aborted at once."""
        place = bisect_left(self, self._key(request), key=self._key)
        if self[place : place + 1] == [request]:
            del self[place]
        else:  # a custom scheduler kept another order
            super().remove(request)

    def in_turn(self) -> Iterator[Request]:
        """One request after another; each may be removed when it is given."""
        return iter(self.copy())
