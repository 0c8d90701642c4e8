"""The chunks of a stream: structs, which are what pydantic writes of the answers' models, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import given, strategies as st

from stage02_server.features.logprobs.fields import CompletionLogProbs
from stage02_server.middleware import RequestIds
from stage02_server.protocol_response import WITH_THE_USAGE
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_chat import ChatMaker, PlainAnswer
from stage02_server.serving_completion import CompletionMaker
from stage02_server.serving_engine import AnswerMaker, EngineRequests
from stage02_server.streaming import server_sent_event
from stage03_engine.outputs import CompletionOutput, RequestOutput

ODD_NAMES = ["model", "\\", "a\"b\u2028'é\x00"]
EVERYTHING = "".join(map(chr, [*range(0x300), 0x2028, 0x2029, 0xFEFF, 0xFFFD, 0xFFFF, 0x1F600, 0x10FFFF]))


class Held:
    """An answer that keeps its text to itself, as one in which tool calls are looked for does."""

    def delta(self, output: CompletionOutput) -> dict[str, Any]:
        return {"content": output.text.upper()} if len(output.text) % 2 else {}

    message = delta

    def finish_reason(self, output: CompletionOutput) -> str | None:
        return output.finish_reason


class Adds(AnswerHook):
    """What features put into the pieces of an answer: models, lists of tokens."""

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        choice.token_ids = output.token_ids
        if hasattr(choice, "text"):
            choice.logprobs = CompletionLogProbs(tokens=[output.text], token_logprobs=[-1e-7, None])

    def chunk(self, index: int, chunk: Any) -> None:
        chunk.model = f"{index}: {chunk.choices[0].index}"


def makers(name: str, hooks: list[AnswerHook], usage: bool = False) -> Iterator[AnswerMaker]:
    def requests() -> EngineRequests:
        return EngineRequests(RequestIds(f"cmpl-{name}", f"cmpl-{name}"), name, 2, [], hooks, usage)

    yield CompletionMaker(requests())
    for kind in (PlainAnswer, Held):
        yield ChatMaker(requests(), "assistant", kind)


def written(maker: AnswerMaker, steps: list[list[tuple[int, str, str | None]]]) -> list[bytes]:
    """What a stream has for these steps of (answer, text, finish reason), for two prompts."""
    chunks = []
    for step in steps:
        answers = [CompletionOutput(index, text, [1], finish_reason=reason) for index, text, reason in step]
        for prompt in (0, 1):
            chunks += maker.chunks(prompt, [RequestOutput("r", None, [1], answers)])
    return [json_of(chunk) for chunk in chunks]


def json_of(event: bytes) -> bytes:
    """What the server-sent event holds."""
    data = event.removeprefix(b"data: ").removesuffix(b"\n\n")
    assert event == server_sent_event(data)
    return data


TEXTS = st.one_of(st.text(), st.sampled_from([EVERYTHING, ""]))
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 1), TEXTS, st.sampled_from([None, None, None, "stop", "length"])), max_size=2),
    max_size=6,
)


@given(st.sampled_from(ODD_NAMES), STEPS, st.booleans(), st.booleans())
def test_a_chunk_is_what_pydantic_writes(
    name: str, steps: list[list[tuple[int, str, str | None]]], usage: bool, features: bool
) -> None:
    hidden = WITH_THE_USAGE - {"usage"} if usage else WITH_THE_USAGE
    for maker in makers(name, [Adds()] if features else [], usage):
        for chunk in written(maker, steps):
            assert maker.last_class.model_validate_json(chunk).model_dump_json(exclude=hidden).encode() == chunk


@given(STEPS)
def test_an_answer_is_told_piece_by_piece(steps: list[list[tuple[int, str, str | None]]]) -> None:
    for maker in makers("model", []):
        told: dict[int, str] = dict.fromkeys(range(4), "")
        for chunk in map(json.loads, written(maker, steps)):
            [choice] = chunk["choices"]
            told[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts = {index: "".join(text for step in steps for k, text, _ in step if k == index % 2) for index in range(4)}
        if not isinstance(maker, ChatMaker) or maker._new_answer is PlainAnswer:
            assert told == texts


def test_a_feature_sees_every_chunk_and_writes_into_none_but_its_own() -> None:
    for maker in makers("model", [Adds()]):
        chunks = written(maker, [[(0, "a", None)], [(0, "b", None)], [(0, "c", "stop")]])
        assert {json.loads(chunk)["model"] for chunk in chunks} == {"0: 0", "2: 2"}
        assert maker._chunk.model == "model"


class Keeps(Adds):
    """A feature that keeps what it has seen, and how it looked."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, bytes]] = []

    def chunk(self, index: int, chunk: Any) -> None:
        self.seen += [(seen, msgspec.json.encode(seen, enc_hook=str)) for seen in (chunk, chunk.choices[0])]


@given(STEPS)
def test_what_a_feature_keeps_stays_as_it_was(steps: list[list[tuple[int, str, str | None]]]) -> None:
    """Only without features a chunk is written over by the next."""
    for kind in range(3):
        keeper = Keeps()
        chunks = written(list(makers("model", [keeper]))[kind], steps)
        assert len(keeper.seen) == 2 * len(chunks)
        for seen, then in keeper.seen:
            assert msgspec.json.encode(seen, enc_hook=str) == then


def test_what_is_held_back_makes_no_chunk_unless_a_feature_adds_to_it() -> None:
    silent = [[(0, "ab", None)]]
    *_, held = makers("model", [])
    assert [json.loads(chunk)["choices"][0]["delta"]["role"] for chunk in written(held, silent)] == ["assistant"] * 2
    assert written(held, silent) == []
    *_, with_ids = makers("model", [Adds()])
    written(with_ids, silent)
    [first, _] = written(with_ids, silent)
    assert json.loads(first)["choices"][0]["token_ids"] == [1]
