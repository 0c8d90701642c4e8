"""Ending an output that repeats itself: against a slow, obvious search, and through the engine with tokens one or several at once."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from stage03_engine.errors import InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.repetition_detection import RepetitionDetectionParams, find_repetition, repeated_pattern
from stage03_engine.sampling_params import SamplingParams

tokens = st.lists(st.integers(0, 2), max_size=30)


@st.composite
def settings_of(draw: st.DrawFn) -> RepetitionDetectionParams:
    largest = draw(st.integers(1, 6))
    return RepetitionDetectionParams(largest, draw(st.integers(0, largest)), draw(st.integers(2, 5)))


def obvious(sequence: list[int], params: RepetitionDetectionParams) -> int | None:
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        pattern = sequence[len(sequence) - size :]
        if (
            len(sequence) >= size * params.min_count
            and sequence[-size * params.min_count :] == pattern * params.min_count
        ):
            return size
    return None


@given(before=tokens, pattern=tokens.filter(bool), times=st.integers(0, 5), params=settings_of())
def test_the_shortest_pattern_at_the_end(
    before: list[int], pattern: list[int], times: int, params: RepetitionDetectionParams
) -> None:
    sequence = before + pattern * times
    assert repeated_pattern(sequence, params) == obvious(sequence, params)


@given(sequence=tokens, cut=st.integers(0, 30), params=settings_of(), min_tokens=st.integers(0, 10))
def test_it_ends_where_it_would_have_ended_one_token_at_a_time(
    sequence: list[int], cut: int, params: RepetitionDetectionParams, min_tokens: int
) -> None:
    before, new = sequence[:cut], sequence[cut:]
    ends = [n for n in range(1, len(new) + 1) if len(before) + n >= min_tokens and obvious(before + new[:n], params)]
    found = find_repetition(before, new, params, min_tokens)
    assert (found and found[0]) == (ends[0] if ends else None)


@pytest.mark.parametrize("values", [(-1, 0, 2), (129, 0, 2), (3, 4, 2), (3, -1, 2), (3, 0, 1), (3, 0, 0)])
def test_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        RepetitionDetectionParams(*values)
    assert refusal.value.param == "repetition_detection"


def test_the_same_end_with_drafts_and_nothing_left_behind() -> None:
    """With speculative decoding several tokens come at once, and those behind the repetition do not count."""
    circles = RepetitionDetectionParams(max_pattern_size=40, min_count=2)
    asks = [
        SamplingParams(temperature=0, max_tokens=48, repetition_detection=circles, logprobs=0),
        SamplingParams(temperature=0, max_tokens=48),
    ]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    ended = []
    for config in (None, drafts):
        with LLM(
            "gpt2-tiny", kv_cache_memory_bytes=50_000_000, speculative_config=config, check_invariants=True
        ) as llm:
            short, full = (llm.generate("la la la la", ask)[0].outputs[0] for ask in asks)
            assert not llm.engine_core._core.scheduler.requests
        assert (short.finish_reason, short.stop_reason) == ("repetition", "repetition_detected")
        assert full.token_ids[: len(short.token_ids)] == short.token_ids and len(short.token_ids) < 48
        assert short.logprobs is not None and len(short.logprobs) == len(short.token_ids)
        assert repeated_pattern(short.token_ids, circles) and not repeated_pattern(short.token_ids[:-1], circles)
        ended.append((short.text, short.token_ids))
    assert ended[0] == ended[1]
