"""Many clients for a while, some of whom leave in the middle: no block is lost, memory stays flat, nobody else notices.

The long form runs for 10 minutes with 64 clients: `pytest -m long tests/test_soak.py -s`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from patience import wait_until
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import ServerProcess

NUM_BLOCKS = 200  # too few for 64 clients: some requests are preempted
FLAGS = ("--host", "127.0.0.1", "--port", "0", "--num-gpu-blocks-override", str(NUM_BLOCKS), "--check-invariants",
         "--disable-uvicorn-access-log", "--server-dev-mode")  # fmt: skip
WORDS = [
    "To",
    "be",
    "or",
    "not",
    "that",
    "is",
    "the",
    "question",
    "whether",
    "it",
    "is",
    "nobler",
    "in",
    "mind",
    "suffer",
    "slings",
    "and",
    "arrows",
    "of",
]
MB = 2**20


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("gpt2-tiny", *FLAGS)
    server.wait_until_ready()
    yield server
    server.close()


def wish(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body of any kind that clients send."""
    text = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 20, 80])))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 60), "stream": rng.random() < 0.7, "ignore_eos": True}
    body |= rng.choice([{}, {"temperature": 0}, {"seed": 3}, {"n": 2}, {"logprobs": 2}, {"stop": ["the"]}])
    if rng.random() < 0.5:
        body["logprobs"] = bool(body.get("logprobs"))
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text}


async def ask(client: httpx.AsyncClient, rng: random.Random, leaves: bool) -> str:
    """One request; a client that leaves does so after some chunks. Returns what became of it."""
    path, body = wish(rng)
    patience = rng.randint(1, 12) if leaves else 10**9
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        last = ""
        async for line in response.aiter_lines():
            if not line:
                continue
            patience -= 1
            if patience == 0:
                return "left"
            if '"error"' in line[:20]:
                return line
            last = line
    if body["stream"]:
        return "served" if last == "data: [DONE]" else f"cut off after {last}"
    answer = json.loads(last)
    return "served" if all(choice["finish_reason"] for choice in answer["choices"]) else last


async def soak(url: str, seconds: float, num_clients: int, rng: random.Random) -> Counter[str]:
    """What became of all requests."""
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def live(number: int) -> None:
        own = random.Random(rng.random())
        while time.monotonic() < until:
            outcomes[await ask(client, own, leaves=number % 3 == 0)] += 1

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        await asyncio.gather(*(live(number) for number in range(num_clients)))
    return outcomes


def metrics(url: str) -> dict[str, float]:
    """The value of each sample, summed over its labels."""
    values: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            values[sample.name] += sample.value
    return values


def check_empty(url: str) -> None:
    """No request, no block is left behind, soon after the last client has gone."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    wait_until(lambda: (now := metrics(url)) and not any(now[name] for name in names), "a request is left behind")
    assert metrics(url)["vllm:kv_cache_usage_perc"] == 0.0
    assert httpx.post(f"{url}/reset_prefix_cache").status_code == 200  # only works when every block is free


def memory(server: ServerProcess) -> dict[int, int]:
    """Bytes of the API process and of the engine."""
    api = psutil.Process(server.process.pid)
    return {process.pid: process.memory_info().rss for process in [api, *api.children()]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "num_clients"), [(2.0, 24), pytest.param(600.0, 64, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_soak(server: ServerProcess, seconds: float, num_clients: int) -> None:
    rng = random.Random(0)
    outcomes = asyncio.run(soak(server.url, seconds / 2, num_clients, rng))
    check_empty(server.url)
    before = memory(server)
    outcomes += asyncio.run(soak(server.url, seconds / 2, num_clients, rng))
    check_empty(server.url)
    after = memory(server)
    assert outcomes.keys() == {"served", "left"}, outcomes
    assert outcomes["served"] > num_clients and outcomes["left"] > 0
    assert after.keys() == before.keys()
    print(dict(outcomes), [f"{before[process] / MB:.0f} to {size / MB:.0f} MB" for process, size in after.items()])
    for process, size in after.items():
        assert size < before[process] + 16 * MB, f"memory grows: {before[process] / MB:.0f} to {size / MB:.0f} MB"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    bad = [line for line in server.lines if not re.match(r"\(\w+ pid=\d+\) (INFO|WARNING) ", line)]
    assert not bad, bad
