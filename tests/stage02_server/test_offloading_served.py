"""`serve --kv-offloading-size` under 16 clients: chats of several turns find in memory what the small prefix cache has lost, and every text is that of an engine
without it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

CLIENTS, TURNS, LENGTH = 16, 3, 12
STEM = "ROMEO: O, she doth teach the torches to burn bright! "
SAID = [f"{STEM * (1 + number % 3)}JULIET, number {number}: " for number in range(CLIENTS)]


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    """The answers of each client's turns."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    with LLM("gpt2-tiny", enable_prefix_caching=False, kv_cache_memory_bytes=100_000_000) as llm:
        texts, answers = list(SAID), [list[str]() for _ in SAID]
        for _ in range(TURNS):
            for number, output in enumerate(llm.generate(texts, params)):  # type: ignore[arg-type]
                answers[number].append(output.outputs[0].text)
                texts[number] += answers[number][-1] + " And then: "
    return answers


def chat(url: str, said: str) -> list[str]:
    """A client's turns: each one begins with all before it."""
    answers = list[str]()
    for _ in range(TURNS):
        body = {"prompt": said, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        answers.append(answer.json()["choices"][0]["text"])
        said += answers[-1] + " And then: "
    return answers


def leave(url: str, said: str) -> None:
    """A client that goes away after the first tokens."""
    body = {"prompt": said, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        next(answer.iter_lines())


def number(url: str, name: str) -> float:
    found = re.search(rf"^vllm:{name}{{.*}} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


@pytest.mark.slow
def test_sixteen_clients_get_the_same_texts(expected: list[list[str]]) -> None:
    few = ("--num-gpu-blocks-override", "40", "--max-num-seqs", "16", "--max-num-batched-tokens", "64")
    server = ServerProcess("gpt2-tiny", "--port", "0", "--kv-offloading-size", "0.05", "--check-invariants", *few)
    try:
        url = server.wait_until_ready()
        with ThreadPoolExecutor(CLIENTS + 4) as clients:
            chats = [clients.submit(chat, url, said) for said in SAID]
            gone = [clients.submit(leave, url, said) for said in SAID[:4]]
            assert [each.result() for each in chats] == expected
            for each in gone:
                each.result()
        assert number(url, "external_prefix_cache_hits_total") > 0
        assert number(url, "num_preemptions_total") > 0
        wait_until(lambda: number(url, "kv_cache_usage_perc") == 0, "a block is lost")
    finally:
        server.close()
