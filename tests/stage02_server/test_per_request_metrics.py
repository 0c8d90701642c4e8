"""How long an answer took, told in the answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from server_under_test import InProcessServer, RecordingEcho, events

from stage02_server.features.per_request_metrics.hook import metrics_of
from stage03_engine.frontend.metrics import RequestStats

CHAT = {"messages": [{"role": "user", "content": "ab"}]}
PATHS: list[tuple[str, dict[str, Any]]] = [("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", CHAT)]
TICK = 0.02  # seconds from token to token


@pytest.fixture
def server(make_server: Callable[..., InProcessServer]) -> InProcessServer:
    return make_server(RecordingEcho(tick_seconds=TICK), enable_per_request_metrics=True)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_times_add_up(server: InProcessServer, path: str, body: dict[str, Any]) -> None:
    for more in ({}, {"n": 2}, {"stream": True, "stream_options": {"include_usage": True}}):
        began = time.perf_counter()
        response = server.post(path, body | {"max_tokens": 4} | more)
        passed = 1000 * (time.perf_counter() - began)
        chunks = events(response.text) if "stream" in more else [response.json()]
        assert not any("metrics" in chunk for chunk in chunks[:-1])
        metrics = chunks[-1]["metrics"]
        assert 0 < metrics["time_to_first_token_ms"] < passed
        assert metrics["queue_time_ms"] >= 0 and metrics["speculative_decoding"] is None
        assert 0 < metrics["generation_time_ms"] < passed - metrics["time_to_first_token_ms"]
        if "n" not in more:  # of several answers these are the slowest one's and the longest span
            assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3)
        later_tokens = 3 * more.get("n", 1)
        assert metrics["tokens_per_second"] == pytest.approx(1000 * later_tokens / metrics["generation_time_ms"])


def test_only_when_there_is_something_to_tell(server: InProcessServer, make_server: Any) -> None:
    for path, body in PATHS:
        one = server.post(path, body | {"max_tokens": 1}).json()["metrics"]
        assert (one["generation_time_ms"], one["mean_itl_ms"], one["tokens_per_second"]) == (0, None, None)
        assert server.post(path, body | {"max_tokens": 1, "use_beam_search": True}).json()["metrics"] is None
        assert not any(
            "metrics" in chunk for chunk in events(server.post(path, body | {"max_tokens": 2, "stream": True}).text)
        )
        assert make_server().post(path, body | {"max_tokens": 1}).json()["metrics"] is None


def test_responses_tell_it_when_they_have_ended(server: InProcessServer, make_server: Any) -> None:
    body = {"input": "ab", "max_output_tokens": 4}
    began = time.perf_counter()
    metrics = server.post("/v1/responses", body).json()["metrics"]
    passed = 1000 * (time.perf_counter() - began)
    assert 0 < metrics["time_to_first_token_ms"] < passed - metrics["generation_time_ms"]
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3)
    lines = server.post("/v1/responses", body | {"stream": True}).text.splitlines()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    *early, last = [event["response"]["metrics"] for event in told if "response" in event]
    assert early and not any(early) and last["generation_time_ms"] > 0
    assert make_server().post("/v1/responses", body).json()["metrics"] is None


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 9), st.floats(0, 9)), min_size=1, max_size=4))
def test_several_answers(answers: list[tuple[float, int, float]]) -> None:
    """(seconds to the first token, number of tokens, seconds from the first to the last) of each."""
    made = [
        RequestStats(1.0, 5, count, 1.0 + first, 1.0 + first + (rest if count > 1 else 0.0))
        for first, count, rest in answers
    ]
    metrics = metrics_of(made)
    assert metrics is not None
    assert metrics.time_to_first_token_ms == pytest.approx(1000 * min(first for first, _, _ in answers))
    assert metrics.generation_time_ms >= max(1000 * (one.last_token - one.first_token) for one in made)
    if metrics.mean_itl_ms is not None:
        slowest = max(
            (one.last_token - one.first_token) / (one.num_output_tokens - 1)
            for one in made
            if one.num_output_tokens > 1
        )
        assert metrics.mean_itl_ms <= 1000 * slowest * (1 + 1e-9)
