"""End a request whose output repeats itself, at the seam of the output processor.

vLLM looks in the scheduler (vllm/v1/core/sched/utils.py check_sequence_repetition); here the front end does, as for stop
strings: so the scheduler's decisions still depend on no token but the ends of text, and a recorded run can be decided again
without its tokens.
"""

from __future__ import annotations

from stage03_engine.frontend.output_processor import OutputEnd, OutputHook, RequestState
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stage03_engine.params.repetition_detection import REPETITION_DETECTED, RepetitionDetectionParams
from stagetrace import trace


class RepetitionDetectionHook(OutputHook):
    """Looks at each new token."""

    def find_end(self, state: RequestState, output: EngineCoreOutput) -> OutputEnd | None:
        """The engine core's reason to end at the newest token takes precedence."""
        params, new = state.request.sampling_params, output.new_token_ids
        seen = new if output.finish_reason is None else new[:-1]
        found = find_repetition(state.token_ids, seen, params.repetition_detection, params.min_tokens)
        if found is None:
            return None
        count, pattern_size = found
        if trace.on:
            trace.emit("request.repetition_found", req=output.request_id, pattern_size=pattern_size)
        return OutputEnd(count, FinishReason.REPETITION, REPETITION_DETECTED)


def repeated_pattern(token_ids: list[int], params: RepetitionDetectionParams) -> int | None:
    """The size of the shortest pattern that the sequence ends with `min_count` times; None when there is none."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > len(token_ids):
            return None
        if token_ids[-1] != token_ids[-1 - size]:
            continue  # the usual case needs no slices
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
