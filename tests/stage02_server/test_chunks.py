"""The chunks of a stream: those in the middle of an answer come from a frame, and are what pydantic writes, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage02_server.middleware import RequestIds
from stage02_server.protocol_response import WITH_THE_USAGE
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_chat import ChatMaker, PlainAnswer
from stage02_server.serving_completion import CompletionMaker
from stage02_server.serving_engine import MARK, AnswerMaker, EngineRequests
from stage03_engine.outputs import CompletionOutput, RequestOutput

ODD_NAMES = ["model", f'"{MARK}"', MARK, "\\", "a\"b\u2028'é\x00"]
EVERYTHING = "".join(map(chr, [*range(0x300), 0x2028, 0x2029, 0xFEFF, 0xFFFD, 0xFFFF, 0x1F600, 0x10FFFF]))


class Held:
    """An answer that keeps its text to itself, as one in which tool calls are looked for does."""

    def delta(self, output: CompletionOutput) -> dict[str, Any]:
        return {"content": output.text.upper()} if len(output.text) % 2 else {}

    message = delta

    def finish_reason(self, output: CompletionOutput) -> str | None:
        return output.finish_reason


def makers(name: str, n: int, hooks: list[AnswerHook]) -> Iterator[AnswerMaker]:
    ids = RequestIds(f"cmpl-{name}", f"cmpl-{name}")
    yield CompletionMaker(EngineRequests(ids, name, n, [], [], hooks))
    for kind in (PlainAnswer, Held):
        yield ChatMaker(EngineRequests(ids, name, n, [], [], hooks), "assistant", kind)


def written(maker: AnswerMaker, steps: list[list[tuple[int, str, str | None]]], hidden: set[str]) -> list[bytes]:
    """What a stream has for these steps of (answer, text, finish reason), for two prompts."""
    chunks = []
    for step in steps:
        answers = [CompletionOutput(index, text, [1], finish_reason=reason) for index, text, reason in step]
        for prompt in (0, 1):
            chunks += maker.chunks(prompt, hidden, [RequestOutput("r", None, [1], answers)])
    return chunks


TEXTS = st.one_of(st.text(), st.sampled_from([MARK, f'"{MARK}"', EVERYTHING, ""]))
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 1), TEXTS, st.sampled_from([None, None, None, "stop", "length"])), max_size=2),
    max_size=6,
)


@given(st.sampled_from(ODD_NAMES), STEPS, st.booleans())
def test_a_frame_holds_what_pydantic_writes(
    name: str, steps: list[list[tuple[int, str, str | None]]], usage: bool
) -> None:
    hidden = WITH_THE_USAGE - {"usage"} if usage else WITH_THE_USAGE
    for fast, slow in zip(makers(name, 2, []), makers(name, 2, [])):
        slow.only_text, slow._created = False, fast._created
        assert written(fast, steps, hidden) == written(slow, steps, hidden)


def test_the_frame_is_used_for_text_alone() -> None:
    """Once an answer has begun, its text is all that pydantic would write anew; not where a feature may add something."""
    for maker, framed in zip(makers("model", 1, []), (True, True, False)):
        written(maker, [[(0, "a", None)]], WITH_THE_USAGE)
        maker.pieces = None  # type: ignore[assignment]  # what makes the choices is not called again
        if framed:
            [chunk, _] = written(maker, [[(0, 'b"', None)]], WITH_THE_USAGE)
            assert 'b"' in str(json.loads(chunk)["choices"])
        else:
            with pytest.raises(TypeError):
                written(maker, [[(0, "b", None)]], WITH_THE_USAGE)


class Marked(AnswerHook):
    def chunk(self, index: int, chunk: Any) -> None:
        chunk.model = f"{index}: {chunk.choices[0].index}"


def test_a_feature_sees_every_chunk() -> None:
    for maker in makers("model", 1, [Marked()]):
        chunks = written(maker, [[(0, "a", None)], [(0, "b", None)], [(0, "c", "stop")]], WITH_THE_USAGE)
        assert chunks and all(json.loads(chunk)["model"][1:] in (": 0", ": 1") for chunk in chunks)
