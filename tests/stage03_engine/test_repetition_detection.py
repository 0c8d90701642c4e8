"""Ending an output that repeats itself: against a slow, obvious search, and through the engine with tokens one or several at once."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from server_under_test import byte_config

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.repetition_detection.repetition_detection import Repetitions
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.frontend.output_processor import OutputProcessor
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from stage03_engine.params.repetition_detection import RepetitionDetectionParams
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


def repeated_pattern(sequence: list[int], params: RepetitionDetectionParams) -> int | None:
    """The size of the shortest pattern that the sequence ends with, whatever it repeated before."""
    repetitions = Repetitions(params)
    found = [repetitions.find([token]) for token in sequence]
    return found[-1][1] if found and found[-1] else None


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
    repetitions = Repetitions(params, min_tokens)
    for token in before:
        repetitions.find([token])
    found = repetitions.find(new)
    assert (found and found[0]) == (ends[0] if ends else None)


@pytest.mark.parametrize("values", [(-1, 0, 2), (129, 0, 2), (3, 4, 2), (3, -1, 2), (3, 0, 1), (3, 0, 0)])
def test_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        RepetitionDetectionParams(*values)
    assert refusal.value.param == "repetition_detection"


@given(sequence=st.lists(st.integers(0, 2), min_size=1, max_size=24), sizes=st.data(), params=settings_of())
def test_what_comes_behind_a_repetition_does_not_count(
    sequence: list[int], sizes: st.DataObject, params: RepetitionDetectionParams
) -> None:
    """However many tokens a step brings: text, tokens and logprobs end together, and the engine is told."""
    processor = OutputProcessor(init_tokenizer_from_configs(byte_config()))
    wishes = SamplingParams(repetition_detection=params, logprobs=0, max_tokens=50)
    processor.add_request(EngineCoreRequest("r", [1], wishes))
    count = next((n for n in range(1, len(sequence) + 1) if obvious(sequence[:n], params)), None)
    rest, last, aborted = sequence, None, []
    while rest and not aborted:
        size = sizes.draw(st.integers(1, len(rest)))
        new, rest = rest[:size], rest[size:]
        logprobs = [TokenLogprobs([token], [-1.0], 1) for token in new]
        (last,), aborted = processor.process_outputs([EngineCoreOutput("r", new, logprobs)], IterationStats())
    assert last is not None and (aborted == ["r"]) == (count is not None) == last.finished
    answer = last.outputs[0]
    assert answer.token_ids == sequence[:count] and answer.text == "".join('!"#'[token] for token in sequence[:count])
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    if count is not None:
        assert (answer.finish_reason, answer.stop_reason) == ("repetition", "repetition_detected")


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_the_engines_reason_for_the_same_token_goes_first(reason: FinishReason) -> None:
    processor = OutputProcessor(init_tokenizer_from_configs(byte_config()))
    wishes = SamplingParams(repetition_detection=RepetitionDetectionParams(1, 0, 2))
    processor.add_request(EngineCoreRequest("r", [1], wishes))
    (output,), aborted = processor.process_outputs([EngineCoreOutput("r", [5, 5], None, reason)], IterationStats())
    assert output.outputs[0].finish_reason == str(reason) and output.outputs[0].token_ids == [5, 5] and not aborted


def test_an_answer_is_cut_where_it_begins_to_repeat_itself() -> None:
    circles = RepetitionDetectionParams(max_pattern_size=40, min_count=2)
    asks = [SamplingParams(temperature=0, max_tokens=48, repetition_detection=how) for how in (circles, None)]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    with LLM("gpt2-tiny", kv_cache_memory_bytes=20_000_000, speculative_config=drafts) as llm:
        short, full = (output.outputs[0] for output in llm.generate(["To be, or"] * 2, asks))
        assert not llm.engine_core._core.scheduler.requests
    assert short.finish_reason == "repetition" and len(short.token_ids) < 48
    assert full.token_ids[: len(short.token_ids)] == short.token_ids and full.text.startswith(short.text)
    assert repeated_pattern(short.token_ids, circles) and not repeated_pattern(short.token_ids[:-1], circles)
