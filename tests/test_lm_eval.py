"""lm-evaluation-harness over HTTP gets the log-likelihoods that transformers has on the same weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_under_test import ServerProcess

import stage03_engine

MODEL = str(Path(stage03_engine.__file__).parent / "bundled" / "gpt2-tiny")
TOLERANCE = 1e-3  # of the sum over a continuation
PAIRS = [
    ("To be, or not to", " be: that is the question"),
    ("ROMEO:\n", "What light through yonder window breaks?"),
    ("", "First Citizen:"),
    ("Now is the winter of our discontent", " made glorious summer"),
    ("a " * 60, "b"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    pytest.importorskip("lm_eval")
    server = ServerProcess("gpt2-tiny", "--port", "0", "--dtype", "float32")
    server.wait_until_ready()
    yield server
    server.close()


def likelihoods(pairs: list[list[int]]) -> list[tuple[float, bool]]:
    """(sum of log-probabilities, is it what greedy decoding gives) of each continuation, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    results = []
    for context, continuation in pairs:
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        rows = logits.log_softmax(-1)
        picked = rows[torch.arange(len(continuation)), torch.tensor(continuation)]
        results.append((picked.sum().item(), rows.argmax(-1).tolist() == continuation))
    return results


def test_log_likelihoods(server: ServerProcess) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    os.environ.setdefault("OPENAI_API_KEY", "none")
    client = LocalCompletionsAPI(
        model="gpt2-tiny", base_url=server.url + "/v1/completions", tokenizer=MODEL,
        tokenizer_backend="huggingface", num_concurrent=1, batch_size=3,
    )  # fmt: skip
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    answers = client.loglikelihood(asked, disable_tqdm=True)
    tokens = []
    for context, continuation in PAIRS:
        if context:
            tokens.append(client._encode_pair(context, continuation))
        else:
            tokens.append(([client.prefix_token_id], client.tok_encode(continuation)))
    for (mine, greedy), (true, is_greedy), pair in zip(answers, likelihoods(tokens), PAIRS, strict=True):
        assert mine == pytest.approx(true, abs=TOLERANCE), pair
        assert greedy == is_greedy, pair
