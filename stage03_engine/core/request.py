"""A request inside the engine core (vllm/v1/request.py)."""

from __future__ import annotations

import enum

from stage03_engine.messages import EngineCoreRequest, FinishReason


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
        self.request_id = message.request_id
        self.sampling_params = message.sampling_params
        self.seed = seed  # the client's, or one of the engine's own
        self.eos_token_id = message.eos_token_id
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.all_token_ids = list(message.prompt_token_ids)
        self.spec_token_ids: list[int] = []  # guesses of what comes next, to be verified
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output so far."""
        return self.num_tokens - self.num_prompt_tokens

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


def check_stop(request: Request, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """Does the newest token end the request? Returns (reason, the stop token id if the request named it), or None.

    A stop token wins over the length limit, as the text would have ended there anyway (vllm/v1/core/sched/utils.py).
    """
    params, last = request.sampling_params, request.all_token_ids[-1]
    if last == request.eos_token_id and not params.ignore_eos:
        return FinishReason.STOP, None
    if last in params.stop_token_ids:
        return FinishReason.STOP, last
    if request.num_tokens >= max_model_len or request.num_output_tokens >= (params.max_tokens or max_model_len):
        return FinishReason.LENGTH, None
    return None
