"""End a request that writes the same tokens again and again (vllm/sampling_params.py RepetitionDetectionParams,
vllm/v1/core/sched/utils.py check_sequence_repetition).

vLLM looks in the scheduler; here the front end does, as for stop strings: so the scheduler's decisions still depend on no token
but the ends of text, and a recorded run can be decided again without its tokens.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from stage03_engine.errors import InvalidRequestError

MAX_PATTERN_SIZE = 128  # each token of the output is compared with patterns of every size up to this
REPETITION_DETECTED = "repetition_detected"  # the stop_reason of a request that ended so
FIELD = "repetition_detection"


class RepetitionDetectionParams(msgspec.Struct, frozen=True):
    """The output ends when its last tokens are one pattern, `min_count` times in a row. `max_pattern_size` 0: never.

    Raises InvalidRequestError for sizes and counts that mean nothing.
    """

    max_pattern_size: int = 0  # tokens
    min_pattern_size: int = 0  # 0 counts as 1
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            allowed = f"in [0, {MAX_PATTERN_SIZE}], got {self.max_pattern_size}"
            raise InvalidRequestError(f"max_pattern_size of {FIELD} must be {allowed}.", FIELD)
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            allowed = f"in [0, max_pattern_size] = [0, {self.max_pattern_size}], got {self.min_pattern_size}"
            raise InvalidRequestError(f"min_pattern_size of {FIELD} must be {allowed}.", FIELD)
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidRequestError(f"min_count of {FIELD} must be at least 2, got {self.min_count}.", FIELD)


def repeated_pattern(token_ids: list[int], params: RepetitionDetectionParams) -> int | None:
    """The size of the shortest pattern that the sequence ends with `min_count` times; None when there is none."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > len(token_ids):
            return None
        if token_ids[-1] != token_ids[-1 - size]:
            continue  # what is nearly always so costs no slices
        tail = token_ids[-length:]
        if tail[size:] == tail[:-size]:
            return size
    return None


def find_repetition(
    before: list[int], new: list[int], params: RepetitionDetectionParams, min_tokens: int
) -> tuple[int, int] | None:
    """After how many of the `new` tokens the output repeats itself, and the size of the pattern; None when it does not."""
    token_ids = list(before)
    for count, token_id in enumerate(new, start=1):
        token_ids.append(token_id)
        size = repeated_pattern(token_ids, params) if len(token_ids) >= min_tokens else None
        if size is not None:
            return count, size
    return None


class RepetitionDetection:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        FIELD: {"output": "stage03_engine.frontend.features.repetition_detection:RepetitionDetectionHook"}
    }
    repetition_detection: RepetitionDetectionParams | None = None  # ends an output that repeats itself
