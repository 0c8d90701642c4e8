"""Many clients at once that bring embeddings, or pictures, over real connections: some disconnect midway, some send half a body and stay. What unfinished
requests hold is given back, nobody starves, and the server's memory does not grow."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import torch
from patience import PATIENCE
from PIL import Image
from safetensors.torch import save
from server_under_test import ServerProcess
from small_llava import SIDE, llava_folder

CLIENTS, ROOM, ADDRESSES = 16, 6, 4  # room for so many of the requests below
KEYS = {"several keys": ("a", "b", "c"), "no key": ()}
FATES = ("whole", "stream", "leaves in the stream", "leaves before the answer", "half a body")
MOST_GROWTH = 40 << 20
"""Of the server's memory from one round to the end, in which sixteen clients send five times as much in each round."""


pytestmark = (
    pytest.mark.slow
)  # test_prompt_embeds_api.py and test_images_api.py have one request after another, in one process


@dataclass
class Thing:
    """What requests bring."""

    path: str
    one: dict[str, Any]  # a body
    all_room: dict[str, Any]  # a body that needs all of it
    flags: tuple[str, ...]


def embeddings() -> Thing:
    text = base64.b64encode(save({"x": torch.randn(440, 256)})).decode()  # as wide as gpt2-tiny
    one = {"prompt_embeds": text, "temperature": 0}
    room = len(text) // 4 * 3 * ROOM
    flags = ("gpt2-tiny", "--enable-prompt-embeds", "--max-held-embeds-bytes", str(room))
    return Thing("/v1/completions", one, one | {"n": ROOM, "temperature": 1}, flags)


def pictures(folder: Path) -> Thing:
    """A large file; the model sees a small picture."""
    file = io.BytesIO()
    Image.frombytes("RGB", (450, 450), bytes(torch.randint(0, 256, (450 * 450 * 3,), dtype=torch.uint8).tolist())).save(
        file, "PNG"
    )
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}

    def body(count: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [part] * count}], "temperature": 0, "ignore_eos": True}

    flags = (str(llava_folder(folder)), "--max-held-image-bytes", str(SIDE * SIDE * 3 * ROOM))
    return Thing("/v1/chat/completions", body(1), body(ROOM), flags)


@dataclass
class Served:
    """A server, and what its clients need."""

    thing: Thing
    url: str
    process: psutil.Process
    keys: tuple[str, ...]

    def client(self, number: int) -> httpx.AsyncClient:
        """With a key of the server's, or an address of its own."""
        transport = httpx.AsyncHTTPTransport(local_address=f"127.0.0.{2 + number % ADDRESSES}")
        return httpx.AsyncClient(
            base_url=self.url, transport=transport, trust_env=False, timeout=PATIENCE, headers=self.headers(number)
        )

    def headers(self, number: int) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[number % len(self.keys)]}"} if self.keys else {}


@pytest.fixture(scope="module", params=["embeddings", "pictures"])
def thing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Thing:
    return embeddings() if request.param == "embeddings" else pictures(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(params=KEYS)
def served(request: pytest.FixtureRequest, thing: Thing) -> Iterator[Served]:
    keys = KEYS[request.param]
    flags = [flag for key in keys for flag in ("--api-key", key)]
    server = ServerProcess(
        *thing.flags, "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "100000000", *flags
    )
    try:
        yield Served(thing, server.wait_until_ready(), psutil.Process(server.process.pid), keys)
    finally:
        server.close()


async def answered(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    """How often it was told to try again later, until it had its answer."""
    refused, end = 0, time.monotonic() + PATIENCE
    while (answer := await client.post(path, json=body)).status_code == 429:
        assert time.monotonic() < end, answer.text
        refused += 1
        await asyncio.sleep(0.02)
    assert answer.status_code == 200, answer.text
    return refused


async def sent_by_hand(served: Served, number: int, share: float) -> asyncio.StreamWriter:
    """A request of which only so much of the body is sent."""
    place, body = urlsplit(served.url), json.dumps(served.thing.one | {"max_tokens": 30}).encode()
    fields = {"Host": place.netloc, "Content-Type": "application/json", "Content-Length": len(body)}
    head = "".join(f"{name}: {value}\r\n" for name, value in (fields | served.headers(number)).items())
    address = (f"127.0.0.{2 + number % ADDRESSES}", 0)
    _, writer = await asyncio.open_connection(place.hostname, place.port, local_addr=address)
    writer.write(f"POST {served.thing.path} HTTP/1.1\r\n{head}\r\n".encode() + body[: int(len(body) * share)])
    await writer.drain()
    return writer


async def suffer(served: Served, number: int, fate: str) -> asyncio.StreamWriter | None:
    """One request, and what becomes of it; one with half a body stays."""
    path, body = served.thing.path, served.thing.one
    if fate == "half a body":
        return await sent_by_hand(served, number, 0.5)
    if fate == "leaves before the answer":
        (await sent_by_hand(served, number, 1)).close()
        return None
    async with served.client(number) as client:
        if fate == "whole":
            await answered(client, path, body | {"max_tokens": 4})
            return None
        async with client.stream("POST", path, json=body | {"max_tokens": 30, "stream": True}) as answer:
            assert answer.status_code in (200, 429)
            async for _ in answer.aiter_lines():
                if fate == "leaves in the stream":
                    break
    return None


async def one_round(served: Served) -> None:
    """Each client suffers all fates, each beginning with another one; those who sent half a body stay until all are through."""

    async def live(number: int) -> list[asyncio.StreamWriter | None]:
        turned = FATES[number % len(FATES) :] + FATES[: number % len(FATES)]
        return [await suffer(served, number, fate) for fate in turned]

    left = await asyncio.gather(*(live(number) for number in range(CLIENTS)))
    for writer in (writer for each in left for writer in each if writer is not None):
        writer.close()
    async with served.client(0) as client:
        await answered(client, served.thing.path, served.thing.all_room | {"max_tokens": 2})


def test_what_is_held_is_given_back_and_the_memory_does_not_grow(served: Served) -> None:
    """After each round one request has room for itself that needs all there is."""

    async def life() -> list[int]:
        found = []
        for _ in range(3):
            await one_round(served)
            found.append(served.process.memory_info().rss)
        return found

    found = asyncio.run(life())
    assert found[-1] - found[0] < MOST_GROWTH, [number >> 20 for number in found]


def test_who_asks_all_the_time_leaves_room_for_another(served: Served) -> None:
    """Twelve clients of one key, or of one address, and one of another, who is never refused."""
    path, stop = served.thing.path, asyncio.Event()

    async def greedy(client: httpx.AsyncClient) -> int:
        refused = 0
        while not stop.is_set():
            answer = await client.post(path, json=served.thing.one | {"max_tokens": 4})
            assert answer.status_code in (200, 429)
            refused += answer.status_code == 429
        return refused

    async def life() -> tuple[int, list[int]]:
        same = len(served.keys) * ADDRESSES or ADDRESSES  # the first key, and the first address
        async with served.client(same) as crowd, served.client(1) as other:
            crowds = [asyncio.create_task(greedy(crowd)) for _ in range(12)]
            seen = [await answered(other, path, served.thing.one | {"max_tokens": 4}) for _ in range(12)]
            stop.set()
            return sum([await each for each in crowds]), seen

    refused, seen = asyncio.run(life())
    assert refused and not any(seen), f"the crowd was refused {refused} times, the other one {seen}"
