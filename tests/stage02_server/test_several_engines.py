"""HTTP in front of several engines, which are echoes that can die: errors, /health, metrics, POST /scale_engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import InProcessServer, events
from steered_engines import Engines, MortalEcho, config_of

from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.messages import EngineCoreOutputs

BODY = {"prompt": "hello", "max_tokens": 40, "temperature": 0}


class Several:
    """A server over echo engines."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.engines = Engines(MortalEcho)
        config = config_of(size, **settings)
        self.client = DPLBAsyncMPClient(config, self.engines)
        self.server = InProcessServer(self.client, config, server_dev_mode=True)  # type: ignore[arg-type]
        self.newest_from: dict[str, int] = {}  # request id -> the engine that its newest token came from
        self.server.engine.listeners.append(self)

    def received(self, outputs: EngineCoreOutputs) -> None:
        """What is passed on to clients."""
        self.newest_from |= {each.request_id: outputs.engine_index for each in outputs.outputs if each.new_token_ids}

    def close(self) -> None:
        """The engine ends."""

    def wait(self, condition: Callable[[], object]) -> None:
        async def until() -> None:
            while not condition():
                await asyncio.sleep(0)

        self.server.run(until())

    def metrics(self, name: str) -> dict[str | None, float]:
        """The label `engine` -> the value."""
        families = text_string_to_metric_families(self.server.request("GET", "/metrics").text)
        return {s.labels.get("engine"): s.value for family in families for s in family.samples if s.name == name}

    def lose(self, index: int) -> None:
        """An engine dies, and its successor does not start yet."""
        self.engines[index].die()
        self.wait(lambda: self.client.states[index] == "loading")


@contextmanager
def several(size: int, **settings: Any) -> Iterator[Several]:
    made = Several(size, **settings)
    try:
        yield made
    finally:
        made.server.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Several]:
    with several(2) as made:
        yield made


def test_each_engine_has_its_own_metrics(two: Several) -> None:
    two.server.run(_together(two, 6))
    tokens = two.metrics("vllm:generation_tokens_total")
    assert tokens.keys() == {"0", "1"} and tokens["0"] == tokens["1"] == 3 * 40
    assert two.metrics("vllm:num_requests_running").keys() == {"0", "1"}
    assert two.metrics("vllm:cache_config_info") == {"0": 1.0, "1": 1.0}
    assert two.metrics("stages:engine_ready") == {"0": 1.0, "1": 1.0}
    assert two.metrics("stages:engine_restarts_total") == {None: 0.0}


async def _together(made: Several, count: int) -> list[httpx.Response]:
    return await asyncio.gather(*(made.server.send("POST", "/v1/completions", json=BODY) for _ in range(count)))


def test_answers_to_one_prompt_may_come_from_several_engines(two: Several) -> None:
    answer = two.server.post("/v1/completions", BODY | {"n": 4, "temperature": 1.0, "max_tokens": 5}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello"] * 4


def test_all_is_well_looks_as_with_one_engine(two: Several) -> None:
    answer = two.server.request("GET", "/health")
    assert (answer.status_code, answer.content) == (200, b"") and "x-server-state" not in answer.headers


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"data_parallel_size": 0},
        {"data_parallel_size": 65},
        {"data_parallel_size": "2"},
        {"data_parallel_size": True},
        [],
    ],
)
def test_impossible_numbers_of_engines_are_refused(two: Several, body: Any) -> None:
    answer = two.server.post("/scale_engines", body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "Bad Request"
    assert two.client.size == 2


def test_one_engine_has_no_such_route(server: InProcessServer) -> None:
    answer = server.post("/scale_engines", {"data_parallel_size": 2})
    assert answer.status_code == 404 and "--data-parallel-size 2 or more" in answer.json()["error"]["message"]


def test_engines_are_added_and_removed() -> None:
    with several(2) as made:
        assert made.server.post("/scale_engines", {"data_parallel_size": 3}).json() == {"data_parallel_size": 3}
        assert made.metrics("stages:engine_ready") == {"0": 1.0, "1": 1.0, "2": 1.0}
        assert made.server.post("/scale_engines", {"data_parallel_size": 3}).status_code == 200
        assert made.server.post("/scale_engines", {"data_parallel_size": 1}).json() == {"data_parallel_size": 1}
        assert made.server.post("/v1/completions", BODY).status_code == 200
        made.engines.start_errors, made.engines.waits = ["no memory"], False
        answer = made.server.post("/scale_engines", {"data_parallel_size": 4})
        assert answer.status_code == 503 and "no memory" in answer.json()["error"]["message"]
        assert made.metrics("stages:engine_ready") == {"0": 1.0}


def test_streams_go_on_when_an_engine_dies() -> None:
    """And the server is degraded until the engine is back."""
    with several(2) as made:

        async def ask(stream: bool) -> httpx.Response:
            return await made.server.send("POST", "/v1/completions", json=BODY | {"stream": stream, "max_tokens": 50})

        async def killed() -> list[httpx.Response]:
            work = [asyncio.create_task(ask(stream=number < 4)) for number in range(8)]
            while len(made.newest_from) < 8:
                await asyncio.sleep(0)
            made.engines[1].die()
            return await asyncio.gather(*work)

        expected = made.server.post("/v1/completions", BODY | {"max_tokens": 50}).json()["choices"][0]["text"]
        made.newest_from.clear()
        answers = made.server.run(killed())
        assert [answer.status_code for answer in answers] == [200] * 8
        assert [answer.json()["choices"][0]["text"] for answer in answers[4:]] == [expected] * 4
        for answer in answers[:4]:
            told = events(answer.text)
            assert "".join(event["choices"][0]["text"] for event in told) == expected

        made.wait(lambda: made.client.states[1] == "loading")
        health = made.server.request("GET", "/health")
        assert health.status_code == 200 and health.headers["x-server-state"] == "degraded"
        assert health.json() == {"state": "degraded", "engines": {"0": "ready", "1": "loading"}}
        assert made.metrics("stages:engine_ready") == {"0": 1.0, "1": 0.0}
        assert made.metrics("stages:engine_restarts_total") == {None: 1.0}
        conflict = made.server.post("/scale_engines", {"data_parallel_size": 3})
        assert conflict.status_code == 409 and "started again" in conflict.json()["error"]["message"]
        made.lose(0)
        health = made.server.request("GET", "/health")
        assert health.status_code == 503 and health.json()["state"] == "degraded" and "error" in health.json()
        for index in (0, 1):
            made.engines[index].may_start.set()
        made.wait(lambda: made.client.num_ready == 2)
        assert made.server.request("GET", "/health").content == b""


@pytest.mark.parametrize("stream", [False, True])
def test_what_two_engines_died_with_is_an_error(stream: bool) -> None:
    """A 500 that a client does not try again, or the error event of a stream. The server goes on."""
    with several(3) as made:

        async def poison() -> httpx.Response:
            body = BODY | {"stream": stream, "max_tokens": 50}
            work = asyncio.create_task(made.server.send("POST", "/v1/completions", json=body))
            for index in (0, 1):
                while index not in made.newest_from.values():
                    await asyncio.sleep(0)
                made.engines[index].die()
            return await work

        answer = made.server.run(poison())
        assert answer.status_code == (200 if stream else 500)
        error = (events(answer.text)[-1] if stream else answer.json())["error"]
        assert (error["code"], error["type"]) == (500, "InternalServerError")
        assert "2 engines when they died" in error["message"]
        assert stream or answer.headers["x-should-retry"] == "false"
        assert made.server.post("/v1/completions", BODY).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_on_differently_is_an_error(stream: bool) -> None:
    """Another engine may round in another way, for instance: the client learns that it has to ask again."""
    with several(2) as made:
        made.engines[1].changes = True

        async def ask() -> httpx.Response:
            body = BODY | {"stream": stream, "max_tokens": 50}
            work = asyncio.create_task(made.server.send("POST", "/v1/completions", json=body))
            while not made.newest_from:
                await asyncio.sleep(0)
            made.engines[0].die()
            return await work

        answer = made.server.run(ask())
        assert answer.status_code == (200 if stream else 503)
        error = (events(answer.text)[-1] if stream else answer.json())["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        assert "continues it differently" in error["message"]


def test_the_last_restart_allowed_ends_the_server() -> None:
    with several(2, restart=1) as made:
        made.lose(1)
        made.engines[0].die()
        made.wait(lambda: made.server.engine.errored)
        answer = made.server.request("GET", "/health")
        assert answer.status_code == 503 and answer.json()["state"] == "failed"
        refused = made.server.post("/v1/completions", BODY)
        assert refused.status_code == 503 and json.loads(refused.text)["error"]["type"] == "ServiceUnavailableError"
