"""What may be asked of the engine: validation of sampling parameters and prompts, and the collector between them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.output_processor import RequestOutputCollector
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

CONFIG = EngineArgs.from_kwargs(model="gpt2-tiny", max_model_len=64)
PROCESSOR = InputProcessor(CONFIG, init_tokenizer_from_configs(CONFIG))
NAN, INF = float("nan"), float("inf")

IMPOSSIBLE = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", NAN), ("temperature", INF),
    ("top_k", -2), ("top_p", 0.0), ("top_p", 1.1), ("top_p", NAN), ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN),
    ("max_tokens", 0), ("max_tokens", -1), ("seed", 2**63), ("logprobs", -1), ("logprobs", 21),
    ("stop", ["a"] * 5), ("stop", ["a", ""]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} must be .*got") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "value", [{"top_k": -1}, {"top_k": 0}, {"temperature": 2.0}, {"stop": ["a"] * 4}, {"logprobs": 0}]
)
def test_the_edges_are_allowed(value: dict) -> None:
    SamplingParams(**value)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        ("", 1, "prompt"),
        ([], 1, "prompt"),
        ([1] * 64, 1, "prompt"),
        ([1] * 1000, 1, "prompt"),
        ([2048], 1, "prompt"),
        ([-1], 1, "prompt"),
        ("lone \ud800 surrogate", 1, "prompt"),
        ("ROMEO", 65, "max_tokens"),
    ],
)
def test_an_impossible_prompt_is_refused(prompt: str | list[int], max_tokens: int, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PROCESSOR.process_inputs("r", prompt, SamplingParams(max_tokens=max_tokens))
    assert caught.value.param == param


@given(st.integers(1, 63), st.one_of(st.none(), st.integers(1, 64)))
def test_max_tokens_never_leaves_the_context(length: int, max_tokens: int | None) -> None:
    request = PROCESSOR.process_inputs("r", [5] * length, SamplingParams(max_tokens=max_tokens))
    assert request.sampling_params.max_tokens == min(max_tokens or 64, 64 - length)
    assert request.prompt_token_ids == [5] * length and request.eos_token_id == 0


def delta(text: str, tokens: list[int], finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, text, tokens, None, "stop" if finished else None)
    return RequestOutput("r", None, [1], [completion], finished)


@given(st.lists(st.tuples(st.text(max_size=3), st.booleans()), min_size=1, max_size=12))
def test_deltas_are_merged_not_lost_however_slowly_they_are_read(steps: list[tuple[str, bool]]) -> None:
    """`True` = the reader reads after this put."""

    async def test() -> None:
        collector, text, tokens = RequestOutputCollector(RequestOutputKind.DELTA), "", []
        for i, (piece, reads) in enumerate(steps):
            collector.put(delta(piece, [i], finished=i == len(steps) - 1))
            if reads or i == len(steps) - 1:
                output = await collector.get()
                text, tokens = text + output.outputs[0].text, tokens + output.outputs[0].token_ids
        assert text == "".join(piece for piece, _ in steps) and tokens == list(range(len(steps)))
        assert output.finished and output.outputs[0].finish_reason == "stop"

    asyncio.run(test())


def test_an_error_overtakes_what_waits() -> None:
    async def test() -> None:
        collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE)
        collector.put(delta("a", [1]))
        collector.put(RuntimeError("dead"))
        collector.put(delta("b", [2]))
        with pytest.raises(RuntimeError, match="dead"):
            await collector.get()

    asyncio.run(test())
