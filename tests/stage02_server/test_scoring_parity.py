"""Scoring over HTTP as evaluation harnesses do it: the log-likelihoods are transformers' on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from server_under_test import ServerProcess, events
from transformers import GPT2LMHeadModel

from stage03_engine.model_path import BUNDLED_FOLDER

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\nROMEO:\nWhat"
FLAGS = (
    "gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000", "--max-num-batched-tokens", "16",
    "--max-num-seqs", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Prompts are computed in chunks of 16 tokens."""
    server = ServerProcess(*FLAGS)
    yield server.wait_until_ready()
    server.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return GPT2LMHeadModel.from_pretrained(BUNDLED_FOLDER / "gpt2-tiny", dtype=torch.float32).eval()


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_loglikelihoods(url: str, model: Any, max_tokens: int, as_ids: bool) -> None:
    prompts: Any = [TEXT, TEXT[20:70], "K"]
    if as_ids:
        prompts = [httpx.post(f"{url}/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    body = {"prompt": prompts, "echo": True, "max_tokens": max_tokens, "logprobs": 1, "temperature": 0}
    for choice in post(url, **body, return_token_ids=True).json()["choices"]:
        ids, logprobs = choice["prompt_token_ids"], choice["logprobs"]
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [rows[place, token].item() for place, token in enumerate(ids[1:])]
        assert len(logprobs["tokens"]) == len(ids) + max_tokens and logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=1e-3)
        best = rows[:-1].max(-1).values.tolist()  # "is it what the model would have said?" is asked of top_logprobs
        likeliest = [max(top.values()) for top in logprobs["top_logprobs"][1 : len(ids)]]
        assert likeliest == pytest.approx(best, abs=1e-3)
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"].startswith(token, offset)


def test_a_stream_of_several_echoed_answers_waits_for_the_prompt(url: str) -> None:
    """Only the first of them computes the prompt's logprobs, and the others find the prompt in the prefix cache."""
    body = {"prompt": TEXT, "echo": True, "max_tokens": 6, "logprobs": 1, "n": 3, "seed": 1, "return_token_ids": True}
    whole = post(url, **body).json()["choices"]
    parts: dict[int, list[dict[str, Any]]] = {}
    for chunk in events(post(url, **body, stream=True).text):
        parts.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    for choice in whole:
        mine = parts[choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"] and choice["text"].startswith(TEXT)
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        assert [t for part in mine for t in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
