"""Long answers are made and written in threads, piece by piece, and are the same as if they were not.

The long form measures: `pytest -m long -k standstill tests/stage02_server/test_long_answers.py`.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from pydantic import BaseModel
from server_under_test import InProcessServer, ServerProcess, events
from standstill import LONGEST, Standstill

import stage02_server
from stage02_server.features.hardening import long_answers
from stage02_server.features.hardening.long_answers import json_pieces
from stage02_server.features.logprobs.fields import ChatLogProb, ChatLogProbs, TokenLogProb
from stage02_server.protocol_response import ChatChoice, ChatCompletionResponse, ChatMessage
from stage02_server.serving_engine import make_usage

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["ab", "c"], "max_tokens": 3, "logprobs": 2, "n": 2, "seed": 1}),
    (COMPLETIONS, {"prompt": [[1, 2], [3, 4]], "max_tokens": 3, "logprobs": 1, "echo": True, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "é"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "prompt_logprobs": 1, "n": 3, "seed": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
    ("/v1/messages", {"model": "byte-model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ("/tokenize", {"prompt": "a,b", "return_token_strs": True}),
    ("/detokenize", {"tokens": [64, 65]}),
]


def without_ids(value: Any) -> Any:
    """What two answers to one request have in common."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "created", "created_at", "completed_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def joined(chunks: list[Any]) -> dict[int, list[Any]]:
    """Text and log-probabilities of each answer. How they are spread over the chunks depends on how fast they are read."""
    answers: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        answer = answers.setdefault(choice["index"], ["", []])
        answer[0] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        logprobs = choice["logprobs"] or {}
        answer[1] += logprobs.get("content", zip(*map(logprobs.get, sorted(logprobs))))
    return answers


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: str(value)[:30])
def test_the_same_answer_wherever_it_is_made(
    server: InProcessServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> list[Any]:
        found = [server.post(path, body).json()]
        if path in (COMPLETIONS, CHAT) and "prompt_logprobs" not in body:
            found.append(joined(events(server.post(path, body | {"stream": True}).text)))
        return found

    at_once = answers()
    monkeypatch.setattr(long_answers, "LONG", -1)
    assert without_ids(answers()) == without_ids(at_once)
    assert gc.isenabled()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
numbers = st.floats(allow_nan=False)
tokens = st.builds(TokenLogProb, texts, numbers, st.lists(st.integers(0, 255), max_size=3))
positions = st.builds(ChatLogProb, texts, numbers, st.just([65]), st.lists(tokens, max_size=3))


@st.composite
def chats(draw: st.DrawFn) -> ChatCompletionResponse:
    choices = []
    for index in range(draw(st.integers(0, 3))):
        message = ChatMessage(role="assistant", content=draw(st.none() | texts))
        logprobs = ChatLogProbs(content=draw(st.lists(positions, max_size=20)) * draw(st.sampled_from([1, 40])))
        choices.append(ChatChoice(index=index, message=message, logprobs=draw(st.none() | st.just(logprobs))))
    return ChatCompletionResponse(id=draw(texts), created=1, model="m", choices=choices, usage=make_usage(1, 2))


class Anything(BaseModel, extra="allow"):
    values: list[Any]
    by_name: dict[str, Any]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)
anything = st.builds(Anything, values=st.lists(plain, max_size=20), by_name=st.dictionaries(texts, plain), more=plain)


@given(answer=chats() | anything | st.builds(Anything, values=st.lists(anything, max_size=20), by_name=st.just({})))
def test_the_pieces_are_what_pydantic_writes(answer: BaseModel) -> None:
    assert b"".join(json_pieces(answer)).decode() == answer.model_dump_json()


def test_no_piece_is_long() -> None:
    top = [TokenLogProb("é", -1.5, [195, 169])] * 20
    content = ChatLogProbs(content=[ChatLogProb("é", -1.5, [195, 169], top)] * 4000)
    choice = ChatChoice(index=0, message=ChatMessage(role="assistant", content="a"), logprobs=content)
    answer = ChatCompletionResponse(id="a", created=1, model="m", choices=[choice], usage=make_usage(1, 2))
    pieces = list(json_pieces(answer))
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 30


def test_more_logprobs_than_the_flag_allows(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server(max_request_logprobs=100)
    for body, status in (
        ({"prompt": ["a"] * 10, "max_tokens": 5, "logprobs": 1}, 200),
        ({"prompt": ["a"] * 10, "max_tokens": 6, "logprobs": 1}, 400),
        ({"prompt": "a", "max_tokens": 6, "logprobs": 1, "n": 10}, 400),
        ({"prompt": "a" * 20, "max_tokens": 1, "prompt_logprobs": 20}, 200),  # one answer may have all of its own
        ({"prompt": ["a" * 20] * 3, "max_tokens": 1, "prompt_logprobs": 1}, 400),
        ({"prompt": ["a" * 20] * 3, "max_tokens": 0, "logprobs": 1, "echo": True}, 400),
    ):
        answer = server.post(COMPLETIONS, body)
        assert answer.status_code == status, (body, answer.text)
        assert status == 200 or "--max-request-logprobs" in answer.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30, "logprobs": True, "n": 4}
    assert server.post(CHAT, chat).status_code == 400
    assert server.post(CHAT, chat | {"n": 1, "top_logprobs": 20}).status_code == 200
    assert server.engine.num_unfinished_requests == 0


WRITERS = {"answer", "dumps", "model_dump_json", "to_json", "dump_json", "JSONResponse", "generate_latest"}
AT_ONCE = {
    "errors.py error_json dumps": "a message has 4,096 characters",
    "features/admin/metrics_text.py get generate_latest": "as many lines as there are metrics, twice a second at most",
    "features/audio/process.py": "a process of its own",
    "features/audio/serving.py": "a chunk of a stream",
    "features/batch": "a process of its own",
    "features/chat_template": "a process of its own, or linear in the prompt",
    "features/data_parallel/routes.py health_of_engines JSONResponse": "a line for each engine",
    "features/dry_run": "before the server starts",
    "features/hardening/long_answers.py": "writes in pieces",
    "features/messages/errors.py error_json dumps": "a message has 4,096 characters",
    "features/messages/maker.py": "an event of a stream: it holds text only",
    "features/messages/protocol.py": "a thread: a part of a request",
    "features/page/openapi.py main JSONResponse": "a process of its own",
    "features/responses/encoded.py": "a thread if it may be long",
    "features/responses/routes.py": "JSON already",
    "features/router/app.py build_app JSONResponse": "a word for each server, 128 at most",
    "features/router/app.py show_health JSONResponse": "a word for each server, 128 at most",
    "features/router/metrics.py text generate_latest": "some lines for each server, 128 at most",
    "features/tools": "a thread, or a part of a request",
    "protocol_response.py _of_feature": "a part of a chunk; features that make it long use `made`",
    "routes.py": "the names in the flags; one state",
    "serving_engine.py": "a chunk of a stream; features that make it long use `made`",
    "streaming.py answer model_dump_json": "what answer_of has found to be short",
    "streaming.py answer_of answer": "what it has found to be short",
}
"""Where an answer is written as JSON (file, function, how) -> why nobody waits for it."""


def test_nothing_long_is_written_on_the_event_loop() -> None:
    """Every place that writes JSON is known; a new one has to say why it is short, or use answer_of."""
    root = Path(stage02_server.__file__).parent
    unknown, used = [], set()
    for path in sorted(root.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in (node.func for node in ast.walk(function) if isinstance(node, ast.Call)):
                how = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
                if how not in WRITERS or (how == "answer" and isinstance(call, ast.Attribute)):
                    continue
                place = f"{path.relative_to(root).as_posix()} {function.name} {how}"
                reasons = [known for known in AT_ONCE if place.startswith(known)]
                used.update(reasons)
                unknown += [] if reasons else [place]
    assert not unknown and used == AT_ONCE.keys()


@pytest.fixture(scope="module")
def serving() -> Iterator[ServerProcess]:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo", "--disable-uvicorn-access-log")
    server.wait_until_ready()
    yield server
    server.close()


WORDS = "to be or not to be that is the question "
FULL_SIZE: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt_logprobs": (COMPLETIONS, {"prompt": [WORDS * 10] * 512, "max_tokens": 1, "prompt_logprobs": 20}),
    "echo and logprobs": (COMPLETIONS, {"prompt": [WORDS] * 4096, "max_tokens": 1, "echo": True, "logprobs": 5}),
    "the same as a stream": (
        COMPLETIONS,
        {"prompt": [WORDS] * 4096, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": True},
    ),
    "many logprobs": (COMPLETIONS, {"prompt": [WORDS] * 256, "max_tokens": 64, "logprobs": 20}),
    "many answers": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "n": 128, "logprobs": True, "top_logprobs": 20},
    ),
    "a long text": ("/tokenize", {"prompt": "hello there " * 43_000, "return_token_strs": True}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FULL_SIZE)
def test_standstill_of_long_answers(serving: ServerProcess, name: str) -> None:
    path, body = FULL_SIZE[name]
    with Standstill(serving.url) as standstill:
        answer = httpx.post(serving.url + path, json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text[:1000]
    assert standstill.seconds < LONGEST


@pytest.mark.long
def test_memory_does_not_grow_with_each_long_answer(serving: ServerProcess) -> None:
    """The worst of them, again and again: at most some tens of times 8 MiB in all."""

    def megabytes() -> int:
        lines = Path(f"/proc/{serving.process.pid}/status").read_text().split("\n")
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024

    path, body = FULL_SIZE["prompt_logprobs"]
    sizes = []
    for _ in range(20):
        assert httpx.post(serving.url + path, json=body, timeout=PATIENCE).status_code == 200
        sizes.append(megabytes())
    assert max(sizes) < 8 * 60 and max(sizes[10:]) < 1.2 * max(sizes[:10])


def test_answers_that_overlap_without_end_do_not_stop_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never again free what is in a cycle."""
    now = 0.0
    monkeypatch.setattr(long_answers, "monotonic", lambda: now)
    collector = long_answers.GarbageCollector()
    with collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with ExitStack() as overlapping:
        ended = overlapping.enter_context(ExitStack())
        ended.enter_context(collector.paused())
        for _ in range(10):
            begun = overlapping.enter_context(ExitStack())
            begun.enter_context(collector.paused())
            now += long_answers.LONGEST_PAUSE / 2
            ended.close()
            ended = begun
        assert gc.isenabled()
    with collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled()
