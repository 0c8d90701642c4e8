"""Attacks with texts: templates that a stranger wrote, chats and prompts that take long. `long` tests measure how long others wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess
from standstill import LONGEST, Standstill

CHAT = "/v1/chat/completions"
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def process() -> Iterator[str]:
    """The address of a server that takes templates from requests."""
    how = ("--engine", "echo", "--host", "127.0.0.1", "--port", "0")
    with closing(
        ServerProcess("gpt2-tiny", *how, "--chat-template", TRIMMING, "--trust-request-chat-template")
    ) as server:
        yield server.wait_until_ready()


def longest_wait(
    url: str, path: str, body: dict[str, Any], attack: list[tuple[str, dict[str, Any]]]
) -> tuple[float, list[int]]:
    """Seconds that a neighbour waits for an answer to `body`, again and again while the attack lasts; and the attack's answers."""
    over, longest = threading.Event(), 0.0

    def send(each: tuple[str, dict[str, Any]]) -> int:
        return httpx.post(url + each[0], json=each[1], timeout=PATIENCE).status_code

    def ask() -> None:
        nonlocal longest
        with httpx.Client(base_url=url, timeout=PATIENCE) as neighbour:
            while not over.is_set():
                start = time.monotonic()
                assert neighbour.post(path, json=body).status_code == 200
                longest = max(longest, time.monotonic() - start)

    with ThreadPoolExecutor(len(attack) + 1) as threads:
        asking = threads.submit(ask)
        answers = list(threads.map(send, attack))
        over.set()
        asking.result()
    return longest, answers


LONG_TEXTS = {
    "one letter": "a" * 7_500_000,
    "words": "To be, or not to be " * 375_000,
    "spaces": " " * 7_500_000,
    "four bytes each": "\U0001d54f" * 1_900_000,
}


@pytest.mark.long
@pytest.mark.parametrize("size", [120_000, 1_000_000, 7_500_000])
def test_standstill_of_a_chat_that_goes_on(process: str, size: int) -> None:
    messages = [{"role": "user", "content": ("a" * 59 + "\n") * (size // 60) + " "}]
    for content in (messages[0]["content"], "x" + "a" * size + " "):
        messages[0]["content"] = content
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
        with Standstill(process) as standstill:
            for path in (CHAT, "/tokenize"):
                assert httpx.post(process + path, json=body, timeout=PATIENCE).status_code in (200, 400)
        print(f"{size} characters: {standstill.seconds:.3f} s")
        assert standstill.seconds < LONGEST


@pytest.mark.long
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_standstill_of_twelve_slow_templates(process: str, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": ENDLESS}
    with Standstill(process) as standstill:
        wait, answers = longest_wait(process, "/tokenize", {"prompt": "a" * 10_000}, [(path, body)] * 12)
        chat, _ = longest_wait(process, "/tokenize", {"messages": body["messages"]}, [(path, body)] * 12)
    print(f"text {wait:.3f} s, chat {chat:.3f} s, health {standstill.seconds:.3f} s, {answers}")
    assert set(answers) == {400, 429}
    assert standstill.seconds < LONGEST and wait < 4 * LONGEST and chat < 4 * LONGEST


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_standstill_of_texts_that_take_long(process: str, name: str) -> None:
    text = LONG_TEXTS[name]
    messages = [{"role": "user", "content": text}]
    attack = [
        ("/tokenize", {"prompt": text}), ("/tokenize", {"messages": messages}), ("/v1/completions", {"prompt": text}),
        ("/v1/messages/count_tokens", {"model": "gpt2-tiny", "messages": messages}),
    ]  # fmt: skip
    with Standstill(process) as standstill:
        wait, answers = longest_wait(process, "/tokenize", {"prompt": "To be, or " * 1000}, attack)
    print(f"{name}: a neighbour's 10,000 characters {wait:.3f} s, health {standstill.seconds:.3f} s, {answers}")
    assert standstill.seconds < LONGEST and wait < 4 * LONGEST
