"""The field `prompt_embeds` of /v1/completions, over HTTP."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from patience import PATIENCE
from safetensors.torch import load_file, save
from server_under_test import InProcessServer, ServerProcess, byte_config, events

from stage03_engine.model_path import BUNDLED_FOLDER

IDS = list(range(5, 45))
BODY: dict[str, Any] = {"model": "gpt2-tiny", "max_tokens": 12, "temperature": 0}
FLAGS = ("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000", "--device", "cpu")
ROWS = next(
    t
    for name, t in load_file(Path(BUNDLED_FOLDER) / "gpt2-tiny/model.safetensors").items()
    if name.endswith("wte.weight")
)[IDS]


def coded(rows: torch.Tensor) -> str:
    return base64.b64encode(save({"x": rows.contiguous()})).decode()


@pytest.fixture(
    scope="module",
    params=[(), ("--data-parallel-size", "2"), ("--api-server-count", "2")],
    ids=["alone", "-dp", "-asc"],
)
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    server = ServerProcess(*FLAGS, "--enable-prompt-embeds", *request.param)
    url = server.wait_until_ready()
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        yield client
    server.close()


def test_the_text_is_that_of_the_ids(client: httpx.Client) -> None:
    expected = client.post("/v1/completions", json=BODY | {"prompt": IDS}).json()
    for embeds in (coded(ROWS), [coded(ROWS)]):
        answer = client.post("/v1/completions", json=BODY | {"prompt_embeds": embeds}).json()
        assert answer["choices"] == expected["choices"]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 12)
    stream = client.post("/v1/completions", json=BODY | {"prompt_embeds": coded(ROWS), "stream": True})
    texts = [chunk["choices"][0]["text"] for chunk in events(stream.text)]
    assert "".join(texts) == expected["choices"][0]["text"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a prompt beside": ({"prompt_embeds": coded(ROWS), "prompt": "x"}, "prompt_embeds", "a prompt, or embeddings"),
    "two": ({"prompt_embeds": [coded(ROWS)] * 2}, "prompt_embeds", "send a request for each"),
    "no base64": ({"prompt_embeds": "ä!" * 200}, "prompt_embeds", "not base64"),
    "cut off": ({"prompt_embeds": coded(ROWS)[:-3]}, "prompt_embeds", ""),
    "another alphabet in the middle": ({"prompt_embeds": coded(ROWS)[:-200] + "-_" * 100}, "prompt_embeds", ""),
    "a pickle": ({"prompt_embeds": base64.b64encode(b"PK\x03\x04" + bytes(200)).decode()}, "prompt_embeds", "no safetensors file"),
    "another width": ({"prompt_embeds": coded(ROWS[:, :-1])}, "prompt_embeds", "the model's embeddings have"),
    "integers": ({"prompt_embeds": coded(ROWS.int())}, "prompt_embeds", "not I32"),
    "not finite": ({"prompt_embeds": coded(ROWS * float("inf"))}, "prompt_embeds", "NaN or infinity"),
    "too long": ({"prompt_embeds": coded(ROWS.repeat(20, 1))}, "prompt", "maximum context length"),
    "echo": ({"prompt_embeds": coded(ROWS), "echo": True}, "echo", "the prompt has no text"),
    "beams": ({"prompt_embeds": coded(ROWS), "use_beam_search": True, "n": 2}, "use_beam_search", "go on from token ids"),
    "prompt_logprobs": ({"prompt_embeds": coded(ROWS), "prompt_logprobs": 1}, "prompt_logprobs", "no token ids"),
    "repetition_penalty": ({"prompt_embeds": coded(ROWS), "repetition_penalty": 1.5}, "repetition_penalty", "no token ids"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_one_line_says_what_is_wrong(client: httpx.Client, what: str) -> None:
    body, param, why = REFUSED[what]
    answer = client.post("/v1/completions", json=BODY | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "BadRequestError", param), error
    assert why in error["message"] and "\n" not in error["message"]


def test_without_the_flag_it_is_refused(make_server: Callable[..., InProcessServer]) -> None:
    answer = make_server().post("/v1/completions", {"prompt_embeds": coded(ROWS)})
    assert answer.status_code == 400 and "--enable-prompt-embeds" in answer.json()["error"]["message"]


def test_the_log_says_how_many_bytes(
    make_server: Callable[..., InProcessServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Not which: they are megabytes, and perhaps a text that is not to be seen."""
    config = byte_config()
    switched_on: Any = replace(config.model_config, enable_prompt_embeds=True)  # type: ignore[call-arg]
    server = make_server(config=replace(config, model_config=switched_on), enable_log_requests=True)
    with caplog.at_level(logging.INFO):
        answer = server.post("/v1/completions", {"prompt_embeds": coded(torch.randn(50, 8)), "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("Received request")]
    assert " bytes" in line and len(line) < 2048
