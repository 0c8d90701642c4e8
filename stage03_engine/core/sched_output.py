"""What the scheduler sends to the worker, and what the worker returns: only what changed since the last step.

Source: vllm/v1/core/sched/output.py (SchedulerOutput), vllm/v1/outputs.py (ModelRunnerOutput).
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from stage03_engine.messages import TokenLogprobs, payload
from stage03_engine.sampling_params import SamplingParams

T = TypeVar("T")


class Extra(Generic[T]):
    """A feature's part in a message of the walk, which carries it and does not look at it: under the feature's name, of one type.

    `kind` is a msgspec.Struct. Its values come as they are while scheduler and worker share a process, and as plain msgpack from a socket.
    """

    def __init__(self, name: str, kind: type[T]) -> None:
        self._name, self._kind = name, kind

    def put(self, extras: dict[str, Any], value: T) -> None:
        """Add it, in place of an earlier one."""
        extras[self._name] = value

    def of(self, extras: dict[str, Any]) -> T | None:
        """It, if it is there. Raises msgspec.ValidationError if it does not fit."""
        value = extras.get(self._name)
        return value if value is None or isinstance(value, self._kind) else payload(value, self._kind)


class NewRequestData(msgspec.Struct, array_like=True, gc=False):
    """A request that the worker does not know: new, or resumed after preemption (then with its output so far)."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    block_ids: list[int]
    num_computed_tokens: int
    task: Any = None  # of the request


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """One step's decision. `new_block_ids` holds, for requests that the worker knows, the blocks to append to their tables."""

    step: int
    scheduled_new_reqs: list[NewRequestData]
    new_block_ids: dict[str, list[int]]
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: list[str]
    preempted_req_ids: list[str]
    extras: dict[str, Any] = {}  # what scheduler hooks tell runner hooks (`Extra`)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens in this step."""
        return sum(self.num_scheduled_tokens.values())


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """Sampled token ids (and logprobs if requested) of the requests that have caught up with all of their tokens.

    `results` holds what runner hooks computed for a request, and `extras` what else they tell scheduler hooks (`Extra`). A request that ended
    since the step was decided gets none of its results."""

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    results: dict[str, dict[str, Any]] = {}
    extras: dict[str, Any] = {}

    def add(self, request_id: str, extra: Extra[T], value: T) -> None:
        """Add a result of a request."""
        extra.put(self.results.setdefault(request_id, {}), value)

    def drop(self, request_id: str) -> None:
        """Forget all that the step computed for a request."""
        for each in (self.sampled_token_ids, self.logprobs, self.results):
            each.pop(request_id, None)
