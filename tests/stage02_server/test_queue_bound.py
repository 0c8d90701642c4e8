"""`--max-queue-len`: a bounded queue refuses with 429, and those who are in are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from server_under_test import InProcessServer, RecordingEcho, byte_config

from stage03_engine.config import SchedulerConfig

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 3}


def bounded(max_num_seqs: int, max_queue_len: int | None) -> InProcessServer:
    config = replace(byte_config(), scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs))
    return InProcessServer(RecordingEcho(config=config), config=config, max_queue_len=max_queue_len)


async def burst(server: InProcessServer, count: int) -> list[Any]:
    return await asyncio.gather(*(server.send("POST", COMPLETIONS, json=BODY) for _ in range(count)))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12))
def test_of_a_burst_as_many_are_served_as_fit_into_a_step_and_the_queue(seqs: int, limit: int, count: int) -> None:
    server = bounded(seqs, limit)
    try:
        for _ in range(2):  # the places are free again afterwards
            answers = server.run(burst(server, count))
            statuses = [answer.status_code for answer in answers]
            assert statuses.count(200) == min(count, seqs + limit)
            for answer in answers:
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"], error["type"]) == (429, 429, "RateLimitError")
                    assert int(answer.headers["retry-after"]) >= 1
    finally:
        server.close()


def test_what_the_scheduler_says_counts_too(make_server: Callable[..., InProcessServer]) -> None:
    """The step may be limited by tokens or blocks, long before it has the most requests."""
    server = make_server(max_queue_len=2)
    for waiting, status in ((1, 200), (2, 429), (0, 200)):
        server.engine.num_waiting_requests = waiting
        assert server.post(COMPLETIONS, BODY).status_code == status
        assert server.request("GET", "/health").status_code == 200
        assert server.post("/tokenize", {"prompt": "x"}).status_code == 200


def test_without_the_flag_the_queue_has_no_bound() -> None:
    server = bounded(1, None)
    try:
        assert {answer.status_code for answer in server.run(burst(server, 50))} == {200}
    finally:
        server.close()


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_an_impossible_bound_is_refused(start_server: Callable[..., Any], value: str) -> None:
    server = start_server("gpt2-tiny", "--engine", "echo", "--port", "0", "--max-queue-len", value)
    assert server.wait() == 2
    assert any("max_queue_len" in line or "--max-queue-len" in line for line in server.lines)


def test_a_prefix_of_the_path_changes_nothing(make_server: Callable[..., InProcessServer]) -> None:
    """A proxy may leave `--root-path` in the path: the bound holds there too, and /health tells the state."""
    server = make_server(max_queue_len=2, root_path="/llm")
    server.engine.num_waiting_requests = 2
    assert [server.post(root + COMPLETIONS, BODY).status_code for root in ("", "/llm")] == [429, 429]
    server.app.state.services.gate.draining = True
    states = [server.request("GET", root + "/health").json().get("state") for root in ("", "/llm")]
    assert states == ["draining", "draining"]
