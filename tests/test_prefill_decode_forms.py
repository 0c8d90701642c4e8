"""`--disaggregate 1:1` with everything else that an engine can do: each kind of request gets what a single engine with the same flags gives it, alone and quiet."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from typing import Any

import pytest
from patience import PATIENCE
from test_engines_die import Several, _kill_under_load
from test_prefill_decode import STEMS, metric, wait_until_no_block_is_used

pytestmark = pytest.mark.slow  # two engines in one process, and test_pairs, have the same in parts

FORMS: dict[str, tuple[str, ...]] = {
    "early decisions": ("--async-scheduling",),
    "batch invariant": ("--batch-invariant",),
    "drafts": ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'),
    "adapters": ("--enable-lora", "--lora-modules", "gpt2-tiny-ship"),
    "a cache of 8 bits": ("--kv-cache-dtype", "int8"),
    "no chunks": ("--no-enable-chunked-prefill",),
    "swapping": ("--preemption-mode", "swap", "--swap-space", "0.01"),
    "fair turns": ("--scheduling-policy", "fair"),
    "the long way each time": ("--max-local-prefill-length", "0"),
}
LONG = ("a cache of 8 bits", "no chunks", "swapping", "fair turns")
LITTLE = ("--num-gpu-blocks-override", "80", "--check-invariants")
PROMPTS = [f"{number}: {STEMS[number % 2] * (2 + number % 3)}" for number in range(6)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "n": 1, "echo": True, "logprobs": 1},
    {"temperature": 0, "prompt_logprobs": 1},
    {"seed": 3, "n": 3},
    {"seed": 4, "n": 2, "best_of": 2, "logprobs": 0},
    {"temperature": 0, "structured_outputs": {"choice": ["yes, my lord", "no, my lord"]}},
    {"temperature": 0, "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
    {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 5, "logit_bias": {"11": 5}},
    {"temperature": 0, "stop": ["the"], "include_stop_str_in_output": True},
    {"seed": 5, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5},
]  # fmt: skip
"""Each is asked for several prompts, streamed and whole."""


def bodies_of(form: str) -> list[dict[str, Any]]:
    models = ["gpt2-tiny", "gpt2-tiny-ship"] if form == "adapters" else ["gpt2-tiny"]
    return [
        {"max_tokens": 16, "stream": stream and "prompt_logprobs" not in kind, "model": model, "prompt": PROMPTS[(number + stream) % 6]} | kind
        for number, kind in enumerate(KINDS)
        for stream in (False, True)
        for model in models
    ]  # fmt: skip


def ask(server: Several, bodies: list[dict[str, Any]]) -> list[Any]:
    return asyncio.run(_kill_under_load(server, server.api, -1, bodies))  # nothing is hit


def blocks_travel(two: Several) -> None:
    """Some have, or the rest shows nothing. Where the machine was so busy that all were late, those of prompts that come alone do."""
    number, end = itertools.count(), time.monotonic() + PATIENCE
    while metric(two.url, "vllm:external_prefix_cache_hits_total")["1"] == 0:
        assert time.monotonic() < end, two.server.lines
        ask(
            two,
            [
                {
                    "model": "gpt2-tiny",
                    "stream": False,
                    "max_tokens": 2,
                    "prompt": f"alone {next(number)}: {STEMS[0] * 3}",
                }
            ],
        )


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.long] if form in LONG else []) for form in FORMS]
)
def test_every_kind_of_request_in_every_form(form: str) -> None:
    """All at once, twice: the second time the decode engine has some of it."""
    flags, bodies = FORMS[form], bodies_of(form)
    quiet = Several(*flags)
    try:
        expected = [answer for body in bodies for answer in ask(quiet, [body])]
    finally:
        quiet.server.close()
    two = Several("--disaggregate", "1:1", *LITTLE, *flags)
    try:
        for _ in range(2):
            for body, right, found in zip(bodies, expected, ask(two, bodies), strict=True):
                assert [text for text, _ in found] == [text for text, _ in right], body
                for (_, logprobs), (_, others) in zip(found, right, strict=True):
                    assert [each for each in logprobs if each] == pytest.approx(
                        [each for each in others if each], abs=1e-3
                    ), body
            wait_until_no_block_is_used(two.url)
        blocks_travel(two)
        two.end()
    finally:
        two.server.close()


def test_who_reads_slowly_gets_all_of_it() -> None:
    """Nobody waits for him, and no block stays in use once he has gone, or read it."""
    body = {
        "model": "gpt2-tiny",
        "prompt": PROMPTS[1],
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 0,
        "stream": False,
    }
    two = Several("--disaggregate", "1:1", *LITTLE)
    try:
        [[(expected, _)]] = ask(two, [body])
        readers = [reader_of(two, body | {"stream": True}) for _ in range(4)]
        assert ask(two, [body | {"max_tokens": 5}] * 8) == [[(expected_start(two, body), [])]] * 8
        gone, *others = readers
        gone.close()
        for reader in others:
            assert read_slowly(reader) == expected
        wait_until_no_block_is_used(two.url)
        two.end()
    finally:
        two.server.close()


def expected_start(server: Several, body: dict[str, Any]) -> str:
    return str(server.post(**body | {"max_tokens": 5}).json()["choices"][0]["text"])


def reader_of(server: Several, body: dict[str, Any]) -> socket.socket:
    """One who has asked, has room for little, and has read nothing."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    made, payload = socket.socket(), json.dumps(body).encode()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    made.sendall(head.encode() + payload)
    return made


def read_slowly(reader: socket.socket) -> str:
    """The text, taken in small bites."""
    data = b""
    with reader:
        while bite := reader.recv(100):
            data += bite
    events = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)
