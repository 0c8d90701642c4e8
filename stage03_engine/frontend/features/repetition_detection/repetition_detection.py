"""End a request whose output repeats itself, at the seam of the output processor.

vLLM looks in the scheduler (vllm/v1/core/sched/utils.py check_sequence_repetition); here the front end does, as for stop
strings: so the scheduler's decisions still depend on no token but the ends of text, and a recorded run can be decided again
without its tokens.
"""

from __future__ import annotations

from collections import deque

from stage03_engine.frontend.output_processor import OutputEnd, OutputHook, RequestState
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stage03_engine.params.repetition_detection import REPETITION_DETECTED, RepetitionDetectionParams
from stagetrace import trace


class RepetitionDetectionHook(OutputHook):
    """Looks at each new token of one request."""

    def __init__(self) -> None:
        self._repetitions: Repetitions | None = None

    def find_end(self, state: RequestState, output: EngineCoreOutput) -> OutputEnd | None:
        """The engine core's reason to end at the newest token takes precedence."""
        if self._repetitions is None:
            params = state.request.sampling_params
            self._repetitions = Repetitions(params.repetition_detection, params.min_tokens)
        new = output.new_token_ids
        found = self._repetitions.find(new if output.finish_reason is None else new[:-1])
        if found is None:
            return None
        count, pattern_size = found
        if trace.on:
            trace.emit("request.repetition_found", req=output.request_id, pattern_size=pattern_size)
        return OutputEnd(count, FinishReason.REPETITION, REPETITION_DETECTED)


class Repetitions:
    """What a growing output repeats. The work per token does not depend on the length of the output.

    Invariant: the newest `_runs[size]` tokens equal those `size` places before them. So the output ends with one pattern of this
    size `min_count` times when the run has at least size * (min_count - 1) tokens.
    """

    def __init__(self, params: RepetitionDetectionParams, min_tokens: int = 0) -> None:
        self._params, self._min_tokens = params, min_tokens
        self._num_tokens = 0
        self._recent: deque[int] = deque(maxlen=params.max_pattern_size)  # the newest token first
        self._runs = [0] * (params.max_pattern_size + 1)

    def find(self, new: list[int]) -> tuple[int, int] | None:
        """After how many of the new tokens the output repeats itself, and the size of the pattern; None when it does not."""
        for count, token_id in enumerate(new, start=1):
            self._add(token_id)
            size = self._pattern_size() if self._num_tokens >= self._min_tokens else None
            if size is not None:
                return count, size
        return None

    def _add(self, token_id: int) -> None:
        for size, earlier in enumerate(self._recent, start=1):
            self._runs[size] = self._runs[size] + 1 if earlier == token_id else 0
        self._recent.appendleft(token_id)
        self._num_tokens += 1

    def _pattern_size(self) -> int | None:
        """The size of the shortest pattern at the end."""
        params = self._params
        for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
            if self._runs[size] >= size * (params.min_count - 1):
                return size
        return None
