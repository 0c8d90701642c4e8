"""Prompts that take long to tokenize, and sound that takes long to decode, hold up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from patience import PATIENCE
from server_under_test import InProcessServer, byte_config

from stage02_server.streaming import LONG, ClientGoneError, in_thread, in_thread_if_long
from stage03_engine.core.features.pooling.manifest import PoolingConfig

LONG_TEXT = "a" * LONG


class SlowTokenizer:
    """Around the tokenizer of a server: texts that are long wait until they are let go. Notes the thread of the text "ab"."""

    def __init__(self, server: InProcessServer) -> None:
        self.begun, self.go, self.threads = threading.Event(), threading.Event(), set[int]()
        tokenizer = server.engine.tokenizer
        backend, tokenizer.max_token_bytes = tokenizer.backend, LONG

        def wait(text: str) -> None:
            if text == "ab":
                self.threads.add(threading.get_ident())
            elif len(text) >= LONG:
                self.begun.set()
                assert self.go.wait(PATIENCE)

        class SlowBackend:
            def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
                wait("".join(texts))
                return backend.encode_batch_fast([text[:8] for text in texts], add_special_tokens=add_special_tokens)

            def __getattr__(self, name: str) -> Any:
                return getattr(backend, name)

        tokenizer.backend = SlowBackend()  # type: ignore[assignment]


@pytest.fixture
def generating(make_server: Callable[..., InProcessServer]) -> InProcessServer:
    return make_server()


@pytest.fixture
def pooling() -> Iterator[InProcessServer]:
    server = InProcessServer(config=replace(byte_config(), pooling_config=PoolingConfig(runner_type="pooling")))
    yield server
    server.close()


async def begun(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, PATIENCE)


def answers_meanwhile(server: InProcessServer, path: str, long: dict[str, Any], short: dict[str, Any]) -> None:
    """While the long one is tokenized the short one is answered, on the event loop's own thread."""
    slow = SlowTokenizer(server)

    async def both() -> None:
        waiting = asyncio.create_task(server.send("POST", path, json=long))
        await begun(slow.begun)
        answer = await server.send("POST", path, json=short)
        assert answer.status_code == 200 and not waiting.done() and not slow.go.is_set()
        slow.go.set()
        assert (await waiting).status_code == 200

    try:
        server.run(both())
    finally:
        slow.go.set()
    assert slow.threads == {threading.get_ident()}


GENERATING: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
    ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 2}),
    ("/v1/completions", lambda text: {"prompt": ["a", text, "b"], "max_tokens": 2, "echo": True}),
    ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
    ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 2}),
    (
        "/v1/messages",
        lambda text: {"model": "byte-model", "messages": [{"role": "user", "content": text}], "max_tokens": 2},
    ),
]
POOLING: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
    ("/v1/embeddings", lambda text: {"input": ["a", text]}),
    ("/pooling", lambda text: {"input": text}),
    ("/score", lambda text: {"text_1": "a", "text_2": [text, "b"]}),
]


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_generating(generating: InProcessServer, path: str, body: Callable[[str], dict[str, Any]]) -> None:
    answers_meanwhile(generating, path, body(LONG_TEXT + "."), body("ab"))


def test_tokenizing_without_the_engine(generating: InProcessServer) -> None:
    answers_meanwhile(generating, "/tokenize", {"prompt": LONG_TEXT}, {"prompt": "ab"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG_TEXT}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("/detokenize", {"tokens": [97] * LONG}),
    ],
)
def test_what_may_take_long_runs_in_the_few_threads_for_it(
    generating: InProcessServer, path: str, body: dict[str, Any]
) -> None:
    """Not in the event loop, and not in the threads that render the templates of all chats."""
    tokenizer, threads = generating.engine.tokenizer, set[str]()

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            threads.add(threading.current_thread().name)
            return real(*args, **more)

        return call

    tokenizer.encode, tokenizer.decode = noted(tokenizer.encode), noted(tokenizer.decode)  # type: ignore[method-assign]
    assert generating.post(path, body).status_code == 200
    assert len(threads) == 1 and threads.pop().startswith("tokenize")


@pytest.mark.parametrize(("path", "body"), POOLING)
def test_pooling(pooling: InProcessServer, path: str, body: Callable[[str], dict[str, Any]]) -> None:
    answers_meanwhile(pooling, path, body(LONG_TEXT + "."), body("ab"))


def test_a_refusal_of_a_long_prompt_is_a_refusal(generating: InProcessServer) -> None:
    for path, body in GENERATING:
        answer = generating.post(path, body("a" * 20_000))
        assert answer.status_code == 400 and "context length" in answer.json()["error"]["message"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, LONG), st.booleans()), max_size=4))
def test_the_same_result_wherever_it_is_made(sizes: list[tuple[int, bool]]) -> None:
    prompts: list[str | list[int]] = ["a" * size if is_text else [7] * size for size, is_text in sizes]
    here = threading.get_ident()

    async def stay() -> dict[str, str]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    made, thread = asyncio.run(in_thread_if_long(prompts, stay, lambda: (list(prompts), threading.get_ident())))
    assert made == prompts
    if sum(map(len, prompts)) > LONG:
        assert thread != here
    elif sum(map(len, prompts)) < LONG - 1000:
        assert thread == here


def test_thousands_of_short_prompts_are_long_together(generating: InProcessServer) -> None:
    slow = SlowTokenizer(generating)
    prompts = ["ab"] * 1000
    assert generating.post("/v1/completions", {"prompt": prompts, "max_tokens": 1}).status_code == 200
    assert threading.get_ident() not in slow.threads


def test_so_many_at_once_and_what_nobody_waits_for_is_not_done() -> None:
    threads, go, ran = ThreadPoolExecutor(2), threading.Event(), []
    gone = asyncio.Event()

    def work(number: int) -> int:
        ran.append(number)
        assert go.wait(PATIENCE)
        return number

    async def leave() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def stay() -> dict[str, str]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def all_of_them() -> list[Any]:
        tasks = [
            asyncio.create_task(in_thread(threads, leave if number == 2 else stay, lambda n=number: work(n)))  # type: ignore[misc]
            for number in range(4)
        ]
        while len(ran) < 2:
            await asyncio.sleep(0)
        gone.set()
        with pytest.raises(ClientGoneError):
            await tasks[2]
        assert ran == [0, 1]
        go.set()
        return [await tasks[number] for number in (0, 1, 3)]

    try:
        assert asyncio.run(all_of_them()) == [0, 1, 3] and ran == [0, 1, 3]
    finally:
        go.set()
        threads.shutdown()
