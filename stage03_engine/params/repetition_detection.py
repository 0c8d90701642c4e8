"""End a request whose output repeats itself (vllm/sampling_params.py RepetitionDetectionParams)."""

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


class RepetitionDetection:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        FIELD: {
            "output": "stage03_engine.frontend.features.repetition_detection.repetition_detection:RepetitionDetectionHook"
        }
    }
    repetition_detection: RepetitionDetectionParams | None = None  # ends an output that repeats itself
