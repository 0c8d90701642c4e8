"""`--max-num-queued-reqs` and `--max-num-queued-tokens`: a full server refuses with 503, and those who are in are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import InProcessServer, RecordingEcho, byte_config, events

from stage03_engine.config import SchedulerConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "x", "max_tokens": 3}
MakeServer = Callable[..., InProcessServer]


def bounded(reqs: int | None = None, tokens: int | None = None) -> InProcessServer:
    config = replace(byte_config(), scheduler_config=SchedulerConfig(max_num_seqs=2))
    client = RecordingEcho(config=config)
    return InProcessServer(client, config=config, max_num_queued_reqs=reqs, max_num_queued_tokens=tokens)


async def burst(server: InProcessServer, count: int, **more: Any) -> list[Any]:
    sent = (server.send("POST", COMPLETIONS, json=BODY | more) for _ in range(count))
    return await asyncio.gather(*sent)


def rejections(server: InProcessServer) -> dict[str, float]:
    families = text_string_to_metric_families(server.request("GET", "/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {s.labels["reason"]: s.value for s in samples if s.name == "vllm:admission_rejections_total"}


@settings(max_examples=15, deadline=None)
@given(limit=st.integers(1, 8), count=st.integers(0, 12), n=st.integers(1, 3), stream=st.booleans())
def test_of_a_burst_as_many_are_served_as_fit(limit: int, count: int, n: int, stream: bool) -> None:
    """A request with n answers takes n places. Refusals have a status of their own, also where the answer would be a stream."""
    server = bounded(reqs=limit)
    try:
        refused = 0
        for _ in range(2):  # the places are free again afterwards
            answers = server.run(burst(server, count, n=n, temperature=1, stream=stream))
            served = [answer for answer in answers if answer.status_code == 200]
            # All reserve one place first, as their bodies are not read: so many of a burst may hold the last ones.
            assert len(served) <= limit // n and (served or not count or n > 1)
            assert n > 1 or len(served) == min(count, limit)
            for answer in served:
                assert "error" not in (events(answer.text)[-1] if stream else answer.json())
            for answer in answers:
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"], error["type"]) == (503, 503, "ServiceUnavailableError")
                    assert int(answer.headers["retry-after"]) >= 1 and "--max-num-queued-reqs" in error["message"]
                    refused += 1
        assert rejections(server) == {"max_num_queued_reqs": refused, "max_num_queued_tokens": 0}
        (alone,) = server.run(burst(server, 1, n=n, temperature=1))
        assert alone.status_code == (200 if n <= limit else 503)
    finally:
        server.close()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
def test_prompt_tokens_count_until_the_first_output(make_server: MakeServer, path: str) -> None:
    """The limit is no capacity: what reaches it is let in, and the next request is not (as in vLLM)."""
    echo = RecordingEcho(tick_seconds=3600)
    server = make_server(echo, max_num_queued_tokens=8)
    asks = {"/v1/responses": {"input": "12345678"}, CHAT: {"messages": [{"role": "user", "content": "12345678"}]}}
    body = asks.get(path, {"prompt": "12345678"})

    async def check() -> None:
        first = asyncio.create_task(server.send("POST", path, json=body))
        while not server.engine.num_unfinished_requests:
            await asyncio.sleep(0)
        second = await server.send("POST", path, json=body)
        assert second.status_code == 503 and "--max-num-queued-tokens" in second.json()["error"]["message"]
        for state in server.engine.output_processor.request_states.values():
            state.stats.num_output_tokens = 1
        third = asyncio.create_task(server.send("POST", path, json=body))
        while server.engine.num_unfinished_requests < 2:
            assert not third.done()
            await asyncio.sleep(0)
        assert (await server.send("GET", "/health")).status_code == 200
        assert (await server.send("POST", "/tokenize", json={"prompt": "x"})).status_code == 200
        for task in (first, third):
            task.cancel()
        await asyncio.gather(first, third, return_exceptions=True)

    server.run(check())
    assert rejections(server) == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 1}


def test_several_prompts_need_a_place_each(make_server: MakeServer) -> None:
    server = make_server(max_num_queued_reqs=3)
    assert server.post(COMPLETIONS, BODY | {"prompt": ["a", "b", "c"]}).status_code == 200
    assert server.post(COMPLETIONS, BODY | {"prompt": ["a", "b", "c", "d"]}).status_code == 503
    assert server.post(COMPLETIONS, BODY | {"prompt": ["a"], "use_beam_search": True, "n": 3}).status_code == 200
    assert server.post(COMPLETIONS, BODY).status_code == 200
    assert server.post(COMPLETIONS, BODY | {"max_tokens": -1}).status_code == 400  # its place is free again
    assert [server.post(COMPLETIONS, BODY).status_code for _ in range(3)] == [200] * 3
    assert rejections(server) == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 0}


async def slowly(body: bytes, rest: asyncio.Event) -> AsyncIterator[bytes]:
    """The first byte of a body, and later the rest."""
    yield body[:1]
    await rest.wait()
    yield body[1:]


def test_who_only_begins_to_send_takes_no_place(make_server: MakeServer) -> None:
    """Neither does one without the key. When the bodies are there at last, each counts."""
    server = make_server(RecordingEcho(tick_seconds=3600), max_num_queued_reqs=2, api_key=("the-key",))
    key, text = {"Authorization": "Bearer the-key", "Content-Type": "application/json"}, json.dumps(BODY).encode()

    async def check() -> list[int]:
        rest = asyncio.Event()
        posts = (server.send("POST", COMPLETIONS, content=slowly(text, rest), headers=key) for _ in range(12))
        slow = [asyncio.create_task(each) for each in posts]
        for _ in range(50):
            await asyncio.sleep(0)
        assert (await server.send("POST", COMPLETIONS, json=BODY)).status_code == 401
        quick = [asyncio.create_task(server.send("POST", COMPLETIONS, json=BODY, headers=key)) for _ in range(2)]
        while server.engine.num_unfinished_requests < 2:
            assert not any(each.done() for each in (*quick, *slow))
            await asyncio.sleep(0)
        for each in quick:
            each.cancel()
        await asyncio.gather(*quick, return_exceptions=True)
        rest.set()
        while sum(each.done() for each in slow) < 10 or server.engine.num_unfinished_requests < 2:
            await asyncio.sleep(0)
        statuses = [each.result().status_code for each in slow if each.done()]
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return statuses

    assert server.run(check()) == [503] * 10
    assert rejections(server) == {"max_num_queued_reqs": 10, "max_num_queued_tokens": 0}


def test_a_body_that_is_too_long_or_never_ends_gives_its_place_back(make_server: MakeServer) -> None:
    server = make_server(max_num_queued_reqs=1, max_request_bytes=1024)

    async def check() -> list[int]:
        gone, statuses = asyncio.Event(), []
        leaver = asyncio.create_task(server.send("POST", COMPLETIONS, content=slowly(b"{", gone)))
        await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        for content in (b"x" * 2000, b"{", b"", json.dumps(BODY).encode()):
            sent = asyncio.Event()
            sent.set()
            headers = {"Content-Type": "application/json"}
            answer = await server.send("POST", COMPLETIONS, content=slowly(content, sent), headers=headers)
            statuses.append(answer.status_code)
        return statuses

    assert server.run(check()) == [413, 400, 400, 200]


def test_a_client_that_leaves_gives_its_place_back(make_server: MakeServer) -> None:
    server = make_server(RecordingEcho(tick_seconds=3600), max_num_queued_reqs=1)

    async def leave() -> int:
        running = asyncio.create_task(server.send("POST", COMPLETIONS, json=BODY))
        while not server.engine.num_unfinished_requests:
            await asyncio.sleep(0)
        refused = await server.send("POST", COMPLETIONS, json=BODY)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return refused.status_code

    assert [server.run(leave()) for _ in range(3)] == [503] * 3


def test_without_the_flags_nothing_is_refused() -> None:
    server = bounded()
    try:
        assert {answer.status_code for answer in server.run(burst(server, 50))} == {200}
        assert rejections(server) == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
    finally:
        server.close()


@pytest.mark.parametrize("value", ["0", "-1", "many"])
@pytest.mark.parametrize("flag", ["--max-num-queued-reqs", "--max-num-queued-tokens"])
def test_an_impossible_bound_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    from stage02_server.__main__ import main

    assert main(["serve", "gpt2-tiny", "--engine", "echo", "--port", "0", flag, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line or flag.removeprefix("--").replace("-", "_") in line


def test_a_prefix_of_the_path_changes_nothing(make_server: MakeServer) -> None:
    """A proxy may leave `--root-path` in the path: the bound holds there too, and /health tells the state."""
    server = make_server(RecordingEcho(tick_seconds=3600), max_num_queued_reqs=1, root_path="/llm")

    async def check() -> list[int]:
        running = asyncio.create_task(server.send("POST", COMPLETIONS, json=BODY))
        while not server.engine.num_unfinished_requests:
            await asyncio.sleep(0)
        statuses = [(await server.send("POST", root + COMPLETIONS, json=BODY)).status_code for root in ("", "/llm")]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return statuses

    assert server.run(check()) == [503, 503]
    server.app.state.services.gate.draining = True
    states = [server.request("GET", root + "/health").json().get("state") for root in ("", "/llm")]
    assert states == ["draining", "draining"]
