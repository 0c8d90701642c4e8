"""A request inside the engine core (vllm/v1/request.py)."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs, payload
from stage03_engine.params.pooling_params import PoolingParams
from stagetrace import trace


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> (PREEMPTED -> RUNNING)* -> FINISHED; WAITING_FOR_FSM first while its grammar compiles."""

    WAITING = enum.auto()
    WAITING_FOR_FSM = enum.auto()
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
        self.cache_salt = message.cache_salt
        self.block_hashes: list[bytes] = []  # one per full block of all_token_ids, as far as they were needed
        self.num_traced_hashes = 0  # of them, those that a trace has told of
        self.num_cached_tokens = 0  # found in the prefix cache when it was first admitted
        self.request_id = message.request_id
        self.sampling_params = message.sampling_params
        self.task = message.task
        self.seed = seed  # the client's, or one of the engine's own
        self.eos_token_id = message.eos_token_id
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.all_token_ids = list(message.prompt_token_ids)
        self.spec_token_ids: list[int] = []  # guesses of what comes next, to be verified
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        # One entry per prompt token but the first, as steps compute them; None: not asked for, or handed out.
        self.prompt_logprobs: list[TokenLogprobs] | None = None if self.sampling_params.prompt_logprobs is None else []

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def traced_params(self) -> dict[str, Any]:
        """What the scheduler looks at, for the trace: enough to decide again in a replay. The ids of stop tokens
        only with --trace-prompts."""
        params = self.sampling_params
        return {
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(params.stop_token_ids) if trace.prompts else [],
            "eos_token_id": self.eos_token_id,
            "priority": self.priority,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "grammar": params.structured_outputs is not None,
            "pooling": None if self.task is None else msgspec.structs.asdict(payload(self.task, PoolingParams)),
        }

    @property
    def misses_prompt_logprobs(self) -> bool:
        """True while positions of the prompt must be computed, and not only their keys and values be at hand (in vLLM such
        a request skips reading the prefix cache)."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True while the request needs what the prefix cache does not have: logits, or hidden states, of its prompt."""
        pools_all = self.task is not None and payload(self.task, PoolingParams).needs_all_tokens
        return self.misses_prompt_logprobs or pools_all

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Take in what a step computed, after `start` others. After a preemption a step computes some of them again."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += entries[len(self.prompt_logprobs) - start :]

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """All of them, once."""
        assert not self.misses_prompt_logprobs, "a position of the prompt was skipped"
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def append_output_token(self, token_id: int) -> None:
        """Take in a sampled token; its keys and values are not computed yet."""
        self.all_token_ids.append(token_id)


def append_tokens(
    request: Request, token_ids: list[int], max_model_len: int
) -> tuple[list[int], tuple[FinishReason, int | None] | None]:
    """Take in what a step sampled, up to the first token that ends the request: what comes behind it is forgotten.

    Returns (the tokens taken in, what `check_stop` says of the last).
    """
    for count, token_id in enumerate(token_ids, start=1):
        request.append_output_token(token_id)
        stop = check_stop(request, max_model_len)
        if stop is not None:
            return token_ids[:count], stop
    return token_ids, None


def take_sampled(
    request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None, max_model_len: int
) -> EngineCoreOutput:
    """As `append_tokens`, with what the front end is to hear of it. logprobs: one entry per sampled token, if asked for."""
    taken, stop = append_tokens(request, token_ids, max_model_len)
    reason, stop_reason = stop or (None, None)
    output = EngineCoreOutput(request.request_id, taken, finish_reason=reason, stop_reason=stop_reason)
    output.new_logprobs = None if logprobs is None else logprobs[: len(taken)]
    output.num_cached_tokens = request.num_cached_tokens
    if (entries := request.take_prompt_logprobs()) is not None:
        output.result = {"prompt_logprobs": entries}
    return output


def check_stop(request: Request, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """Does the newest token end the request? Returns (reason, the stop token id if the request named it), or None.

    A stop token wins over the length limit, as the text would have ended there anyway (vllm/v1/core/sched/utils.py).
    """
    params, last = request.sampling_params, request.all_token_ids[-1]
    if request.num_output_tokens < params.min_tokens and request.num_tokens < max_model_len:
        return None  # such a token cannot be drawn yet; but a drafted or forced one must not end the request either
    if last == request.eos_token_id and not params.ignore_eos:
        return FinishReason.STOP, None
    if last in params.stop_token_ids:
        return FinishReason.STOP, last
    if request.num_tokens >= max_model_len or request.num_output_tokens >= (params.max_tokens or max_model_len):
        return FinishReason.LENGTH, None
    return None
