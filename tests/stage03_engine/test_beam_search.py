"""Beam search against transformers' on the bundled model: the same sequences in the same order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import GPT2LMHeadModel

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.beam_search.beam_search import BeamSearch, BeamSearchParams, run_search
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stagetrace import read_run, trace
from stagetrace.__main__ import main
from stagetrace.ids import is_beam, root_of

EOS = 0
PROMPTS = ["To be, or", "ROMEO:", "My lord, I", "KING"]


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(llm: LLM) -> Any:
    return GPT2LMHeadModel.from_pretrained(llm.vllm_config.model_config.model_path, dtype=torch.float32).eval()


def transformers_beams(model: Any, ids: list[int], eos: int, params: BeamSearchParams) -> list[list[int]]:
    width = params.beam_width
    found = model.generate(
        torch.tensor([ids]), num_beams=width, num_return_sequences=width, max_new_tokens=params.max_tokens, do_sample=False,
        length_penalty=params.length_penalty, early_stopping=params.early_stopping, pad_token_id=-1, eos_token_id=eos,
    )  # fmt: skip
    return [[token for token in row[len(ids) :].tolist() if token != -1] for row in found]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.slow(keep=("3--1.0-True", "5-1.0-False"))
def test_sequences_and_order_equal_transformers(
    llm: LLM, model: Any, width: int, length_penalty: float, early_stopping: bool
) -> None:
    """The id of "." or of a line break as the end makes sequences of many lengths; the real one hardly ever comes."""
    params = BeamSearchParams(
        beam_width=width, max_tokens=8, length_penalty=length_penalty, early_stopping=early_stopping
    )
    for prompt, end in zip(PROMPTS, (".", "\n", ",")):
        ids = llm.tokenizer.encode(prompt)
        eos = llm.tokenizer.encode(end)[0]
        request = llm.input_processor.process_inputs("x", ids, params.prompt_params())
        request.eos_token_id = eos
        search = BeamSearch(request, params, 2048)
        while not search.done:
            search.advance(answers(llm, search))
        ours = [answer.token_ids for answer in search.output(None, llm.tokenizer).outputs]
        assert ours == transformers_beams(model, ids, eos, params)


def answers(llm: LLM, search: BeamSearch) -> list[TokenLogprobs]:
    requests = search.step_requests()
    for request in requests:
        llm.add_request(request)
    done = {o.request_id: o.outputs[0].logprobs[0] for o in llm.run() if o.finished}
    return [done[request.request_id] for request in requests]


def test_many_prompts_at_once_give_what_each_gives_alone(llm: LLM, model: Any) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    together = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, together):
        [alone] = llm.beam_search(prompt, params)
        assert [a.token_ids for a in output.outputs] == [a.token_ids for a in alone.outputs]
        assert [a.token_ids for a in output.outputs] == transformers_beams(model, output.prompt_token_ids, EOS, params)
        assert [a.index for a in output.outputs] == [0, 1, 2] and output.prompt == prompt and output.finished
        for answer in output.outputs:
            assert answer.text == llm.tokenizer.decode(answer.token_ids) and answer.finish_reason == "length"
            assert answer.cumulative_logprob < 0
    assert not llm.output_processor.request_states


def test_the_end_of_text_is_a_stop_and_no_text(llm: LLM) -> None:
    ids = llm.tokenizer.encode("ROMEO:")
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    request = llm.input_processor.process_inputs("x", ids, params.prompt_params())
    request.eos_token_id = eos = llm.tokenizer.encode("\n")[0]
    search = BeamSearch(request, params, 2048)
    while not search.done:
        search.advance(answers(llm, search))
    found = search.output("ROMEO:", llm.tokenizer).outputs
    stopped = [answer for answer in found if answer.finish_reason == "stop"]
    assert stopped and all(a.token_ids[-1] == eos and not a.text.endswith("\n\n") for a in stopped)
    assert stopped[0].text == llm.tokenizer.decode(stopped[0].token_ids[:-1])


def test_ignore_eos_goes_to_the_end(llm: LLM) -> None:
    prompt, params = [5] * 505, BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True)
    [output] = llm.beam_search(prompt, params)
    assert [len(a.token_ids) for a in output.outputs] == [7, 7]


def toy(table: list[list[float]], width: int, **params: Any) -> tuple[BeamSearch, Any]:
    """A search over a toy model whose next-token logprobs depend on the last token only."""
    wishes = BeamSearchParams(beam_width=width, max_tokens=5, **params)
    request = EngineCoreRequest("x", [1], wishes.prompt_params(), eos_token_id=EOS)

    async def generate(request: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None]:
        row = table[request.prompt_token_ids[-1]]
        order = sorted(range(len(row)), key=lambda token: -row[token])[: request.sampling_params.num_candidates]
        entry = TokenLogprobs([order[0], *order], [row[order[0]], *(row[token] for token in order)], 1)
        yield RequestOutput("x", None, [], [CompletionOutput(0, "", [order[0]], [entry])], finished=True)

    return BeamSearch(request, wishes, len(table)), generate


@given(seed=st.integers(0, 10**6), early=st.booleans(), penalty=st.sampled_from([-0.5, 0.0, 1.0, 1.5]))
def test_a_width_that_holds_everything_finds_the_best_sequence(seed: int, early: bool, penalty: float) -> None:
    """Exhaustive search is the definition: with early stopping off and no length penalty, nothing better exists."""
    vocab = 4
    table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)).log_softmax(-1).tolist()
    search, generate = toy(table, 64, length_penalty=penalty, early_stopping=early)
    asyncio.run(run_search(search, generate))
    found = search.finished
    assert [beam.score for beam in found] == sorted((beam.score for beam in found), reverse=True)
    for beam in found:
        path = [1, *beam.token_ids]
        logprob = math.fsum(table[a][b] for a, b in pairwise(path))
        assert beam.logprob == pytest.approx(logprob) and beam.score == pytest.approx(
            logprob / len(path[1:]) ** penalty
        )
        assert len(beam.token_ids) == 5 or (beam.token_ids[-1] == EOS and EOS not in beam.token_ids[:-1])
    assert len({beam.token_ids for beam in found}) == len(found)


def test_in_a_trace_the_steps_belong_to_the_one_request_that_searches(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.open(str(tmp_path))
    try:
        [output] = llm.beam_search("To be, or", BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=2.0))
    finally:
        trace.close()
    run = read_run(tmp_path)
    [start], [end], steps = run.named("beam.start"), run.named("beam.finished"), run.named("beam.step")
    assert {event.req for event in (start, end, *steps)} == {output.request_id} and len(steps) == 4
    assert start.args == {
        "beam_width": 3, "max_tokens": 4, "num_prompt_tokens": 4, "length_penalty": 2.0, "early_stopping": False
    }  # fmt: skip
    assert end.args == {"reason": "length", "sequences": 3, "num_output_tokens": 4}
    others = {event.req for event in run.events if event.req is not None} - {output.request_id}
    assert len(others) == 1 + 3 * 3 and all(is_beam(each) and root_of(each) == output.request_id for each in others)
    assert main(["show", str(tmp_path)]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[0] == output.request_id and row.split()[2:6] == ["4", "0", "4", "0"] and "length" in row
    assert main(["show", str(tmp_path), "--req", output.request_id]) == 0
    assert "prompt 4 tokens; output 4 tokens; end: length" in capsys.readouterr().out
    assert main(["stats", str(tmp_path)]) == 0
    assert "requests: 1, 1 of them with tokens (4)" in capsys.readouterr().out


def test_a_cancelled_search_leaves_nothing_running(tmp_path: Path) -> None:
    async def test() -> None:
        open_now = 0

        async def generate(request: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None]:
            nonlocal open_now
            open_now += 1
            try:
                await asyncio.Event().wait()
                yield RequestOutput("x", None, [])
            finally:
                open_now -= 1

        search, _ = toy([[0.0] * 4] * 4, 2)
        task = asyncio.create_task(run_search(search, generate))
        while not open_now:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert open_now == 0

    trace.open(str(tmp_path))
    try:
        asyncio.run(test())
    finally:
        trace.close()
    assert [event.args["reason"] for event in read_run(tmp_path).named("beam.finished")] == ["abort"]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"beam_width": 0}, "n"),
        ({"beam_width": 65}, "n"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
    ],
)
def test_an_impossible_value_is_refused_by_name(params: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}") as caught:
        BeamSearchParams(**params)
    assert caught.value.param == field
