"""The field `prompt_embeds` of /v1/completions, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
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
from server_under_test import InProcessServer, RecordingEcho, ServerProcess, byte_config, events

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
    "a prompt beside": ({"prompt_embeds": coded(ROWS), "prompt": "x"}, "prompt_embeds", "a prompt or embeddings, not both"),
    "two": ({"prompt_embeds": [coded(ROWS)] * 2}, "prompt_embeds", "send a request for each"),
    "no base64": ({"prompt_embeds": "ä!" * 200}, "prompt_embeds", "not base64"),
    "cut off": ({"prompt_embeds": coded(ROWS)[:-3]}, "prompt_embeds", ""),
    "another alphabet in the middle": ({"prompt_embeds": coded(ROWS)[:-200] + "-_" * 100}, "prompt_embeds", ""),
    "a pickle": ({"prompt_embeds": base64.b64encode(b"PK\x03\x04" + bytes(200)).decode()}, "prompt_embeds", "not a safetensors file"),
    "another width": ({"prompt_embeds": coded(ROWS[:, :-1])}, "prompt_embeds", "as the model's embeddings do"),
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


def switched_on() -> Any:
    config = byte_config()
    model: Any = replace(config.model_config, enable_prompt_embeds=True)  # type: ignore[call-arg]
    return replace(config, model_config=model)


class Standing(RecordingEcho):
    """Gives no token before it is let go."""

    go_on = False

    async def get_output_async(self) -> Any:
        while not self.go_on:
            await asyncio.sleep(0.001)
        return await super().get_output_async()


FILE = coded(torch.ones(50, 8))
SIZE = len(FILE) // 4 * 3


async def sent(server: InProcessServer, key: str = "", **more: Any) -> int:
    body = {"prompt_embeds": FILE, "max_tokens": 2} | more
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return (await server.send("POST", "/v1/completions", json=body, headers=headers)).status_code


@pytest.mark.parametrize(
    "more", [{}, {"stream": True}, {"n": 2, "temperature": 1}, {"n": 2, "temperature": 1, "stream": True}], ids=str
)
def test_what_unfinished_requests_hold_is_bounded(
    make_server: Callable[..., InProcessServer], more: dict[str, Any]
) -> None:
    """Two may wait; the third is refused, before it is decoded, until they have ended, whole or streamed, with one answer or two."""
    size, config = SIZE * more.get("n", 1), switched_on()
    client = Standing(config=config)
    server = make_server(client, config=config, max_held_embeds_bytes=3 * size - 1)

    async def life() -> list[int]:
        first = [asyncio.create_task(sent(server, **more)) for _ in range(2)]
        while len(client.added) < 2 * more.get("n", 1):
            await asyncio.sleep(0.001)
        body = {"prompt_embeds": FILE, "max_tokens": 2} | more
        third = asyncio.create_task(server.send("POST", "/v1/completions", json=body))
        while not third.done():
            await asyncio.sleep(0.001)
            assert len(client.added) <= 2 * more.get("n", 1), "it is not refused"
        refused = await third
        assert refused.status_code == 429 and "Retry-After" in refused.headers
        assert "--max-held-embeds-bytes" in refused.json()["error"]["message"]
        text = asyncio.create_task(server.send("POST", "/v1/completions", json={"prompt": "ab", "max_tokens": 2}))
        client.go_on = True
        assert (await text).status_code == 200, "a text holds none"
        return [await each for each in first]

    assert server.run(life()) == [200, 200]
    held = server.app.state.openai_serving_completion.held
    assert held.number == 0, "a request that has ended is still counted"
    assert server.post("/v1/completions", {"prompt_embeds": FILE[:-4], "max_tokens": 2}).status_code == 400
    assert held.number == 0, "a request that was refused is still counted"


@pytest.mark.parametrize("share", [0.5, 1])
@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=str)
def test_who_leaves_gives_back_what_the_request_held(
    make_server: Callable[..., InProcessServer], more: dict[str, Any], share: float
) -> None:
    """With half of the body sent, or while the engine works."""
    config = switched_on()
    client = Standing(config=config)
    server = make_server(client, config=config, max_held_embeds_bytes=SIZE)
    held = server.app.state.openai_serving_completion.held
    content = json.dumps({"prompt_embeds": FILE, "max_tokens": 2} | more).encode()
    body = {"type": "http.request", "body": content[: int(len(content) * share)], "more_body": share < 1}
    messages = [body]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while share == 1 and not client.added:
            await asyncio.sleep(0)
        assert held.number == SIZE * (share == 1)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1), "server": ("test", 80), "root_path": "",
    }  # fmt: skip
    server.run(server.app(scope, receive, send))
    assert held.number == 0 and not server.engine.num_unfinished_requests
    client.go_on = True
    assert server.run(sent(server)) == 200


def test_one_key_leaves_room_for_the_others(make_server: Callable[..., InProcessServer]) -> None:
    config = switched_on()
    client = Standing(config=config)
    server = make_server(client, config=config, max_held_embeds_bytes=4 * SIZE, api_key=("a", "b"))

    async def life() -> list[int]:
        waiting = [asyncio.create_task(sent(server, "a")) for _ in range(2)]
        while len(client.added) < 2:
            await asyncio.sleep(0.001)
        third = asyncio.create_task(sent(server, "a"))
        while not third.done():
            await asyncio.sleep(0.001)
            assert len(client.added) == 2, "it is not refused"
        waiting.append(asyncio.create_task(sent(server, "b")))
        client.go_on = True
        return [await third, *[await each for each in waiting]]

    assert server.run(life()) == [429, 200, 200, 200]


def test_the_log_says_how_many_bytes(
    make_server: Callable[..., InProcessServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Not which: they are megabytes, and perhaps a text that is not to be seen."""
    server = make_server(config=switched_on(), enable_log_requests=True)
    with caplog.at_level(logging.INFO):
        answer = server.post("/v1/completions", {"prompt_embeds": coded(torch.randn(50, 8)), "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("Received request")]
    assert " bytes" in line and len(line) < 2048
