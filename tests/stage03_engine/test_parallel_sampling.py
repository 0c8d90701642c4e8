"""n and best_of: one request for the caller, however many answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage03_engine.frontend.features.parallel_sampling.parallel_sampling import ParentRequest
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        yield llm


def singles(llm: LLM, seeds: range, **params: Any) -> list[CompletionOutput]:
    wishes = [SamplingParams(seed=seed, logprobs=0, **params) for seed in seeds]
    return [output.outputs[0] for output in llm.generate(["ROMEO:"] * len(wishes), wishes)]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_n_answers_are_those_of_n_requests_with_the_next_seeds(llm: LLM, kind: RequestOutputKind) -> None:
    alone = singles(llm, range(7, 10), max_tokens=20, stop=["th"])
    params = SamplingParams(seed=7, n=3, max_tokens=20, stop=["th"], output_kind=kind)
    text, tokens, ends = [""] * 3, [[] for _ in range(3)], [None] * 3
    for output in llm.stream("ROMEO:", params):
        assert output.prompt == "ROMEO:" and output.request_id.startswith("r")
        for answer in output.outputs:
            delta = kind == RequestOutputKind.DELTA
            text[answer.index] = text[answer.index] + answer.text if delta else answer.text
            tokens[answer.index] = tokens[answer.index] + answer.token_ids if delta else answer.token_ids
            ends[answer.index] = answer.finish_reason
    assert output.finished and len({a.text for a in alone}) == 3
    assert text == [a.text for a in alone] and tokens == [a.token_ids for a in alone]
    assert ends == [a.finish_reason for a in alone]
    if kind == RequestOutputKind.FINAL_ONLY:
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert not llm.output_processor.external_req_ids and not llm.output_processor.request_states


def test_best_of_returns_the_most_likely_answers(llm: LLM) -> None:
    alone = singles(llm, range(3, 9), max_tokens=12)
    params = SamplingParams(seed=3, n=2, best_of=6, max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = llm.generate("ROMEO:", params)
    wanted = sorted(alone, key=lambda a: -sum(entry.logprobs[0] for entry in a.logprobs))[:2]
    assert [a.token_ids for a in output.outputs] == [a.token_ids for a in wanted]
    assert [a.index for a in output.outputs] == [0, 1]
    assert output.outputs[0].logprobs is None, "only the engine needed them"
    assert output.outputs[0].cumulative_logprob == pytest.approx(wanted[0].cumulative_logprob)


def test_the_end_of_a_parent_is_the_end_of_its_children(llm: LLM) -> None:
    stream = llm.stream("ROMEO:", SamplingParams(n=4, max_tokens=400, ignore_eos=True))
    next(stream)
    assert len(llm.engine_core._core.scheduler.requests) == 4
    stream.close()
    assert not llm.output_processor.external_req_ids and not llm.output_processor.request_states
    assert not llm.engine_core._core.scheduler.has_unfinished_requests


def test_an_abort_by_the_parents_id_names_the_children_that_still_run(llm: LLM) -> None:
    processor = llm.output_processor
    request = llm.input_processor.process_inputs("p", "K", SamplingParams(n=3, seed=1))
    children = [child.request_id for child in processor.add_request(request)]
    with pytest.raises(ValueError, match="already running"):
        processor.add_request(request)
    assert processor.abort_requests(children[:1]) == children[:1]
    assert processor.abort_requests(["p"]) == children[1:]
    assert processor.abort_requests(["p"]) == [] and not processor.external_req_ids and not processor.request_states


def test_prompt_logprobs_are_computed_once(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, prompt_logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = llm.generate("To be, or", params)
    assert len(output.outputs) == 3 and output.prompt_logprobs is not None
    request = llm.input_processor.process_inputs("p", "To be, or", params)
    asked = [child.sampling_params.prompt_logprobs for child in ParentRequest(request).children]
    assert asked == [1, None, None]


@given(st.data())
def test_deltas_of_several_answers_merge_by_their_index(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=2)), min_size=1, max_size=10))
    merged = RequestOutput("p", None, [1], [])
    for index, text in steps:
        merged.add(RequestOutput("p", None, [1], [CompletionOutput(index, text, [ord(c) for c in text])]), True)
    for answer in merged.outputs:
        assert answer.text == "".join(text for index, text in steps if index == answer.index)
        assert answer.token_ids == [ord(c) for c in answer.text]
    assert {answer.index for answer in merged.outputs} == {index for index, _ in steps}


@given(st.permutations(range(4)))
def test_final_only_waits_for_the_last_and_sorts(order: list[int]) -> None:
    params = SamplingParams(n=4, output_kind=RequestOutputKind.FINAL_ONLY)
    parent = ParentRequest(EngineCoreRequest("p", [1], params))
    for place, index in enumerate(order):
        answer = CompletionOutput(index, str(index), [index], finish_reason="stop")
        made = parent.merge(RequestOutput(f"{index}_p", None, [1], [answer], finished=True))
        assert (made is None) == (place < 3)
    assert made.finished and made.request_id == "p" and [a.text for a in made.outputs] == list("0123")


def test_in_a_stream_other_answers_wait_for_the_prompts_logprobs() -> None:
    """Only the first child computes them, and with the prompt in the cache another may speak before it."""
    params = SamplingParams(n=2, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    parent = ParentRequest(EngineCoreRequest("p", [1, 2], params))

    def said(index: int, text: str, prompt_logprobs: Any = None) -> RequestOutput | None:
        output = RequestOutput(f"{index}_p", None, [1, 2], [CompletionOutput(index, text, [7])], False, prompt_logprobs)
        return parent.merge(output)

    assert said(1, "a") is None and said(1, "b") is None
    first = said(0, "x", [None, TokenLogprobs([2], [0.0], 1)])
    assert first is not None and first.prompt_logprobs is not None
    assert [(answer.index, answer.text, answer.token_ids) for answer in first.outputs] == [
        (1, "ab", [7, 7]),
        (0, "x", [7]),
    ]
    later = said(1, "c")
    assert later is not None and [answer.text for answer in later.outputs] == ["c"]
