"""POST /sleep, POST /wake_up, GET /is_sleeping: who has them, what they answer, and what everybody else is told meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, wait_until
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import InProcessServer, ServerProcess, events

from stage02_server.features.sleep.routes import dev_router
from stagetrace import read_run
from stagetrace.check.invariants import check
from stagetrace.check.reasons import find_request
from stagetrace.errors import TraceError

ROUTES = [(method, route.path) for route in dev_router.routes for method in sorted(route.methods)]  # type: ignore[attr-defined]
FLAGS = ("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000", "--device", "cpu")
FORMS = {
    "alone": (),
    "-dp": ("--data-parallel-size", "2"),
    "-asc": ("--api-server-count", "2"),
    "in one process": ("--in-process",),
}
EACH = [pytest.param(form, marks=[pytest.mark.slow] * (form != "alone")) for form in FORMS]
BODY = {"model": "gpt2-tiny", "prompt": "To be, or", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module", params=EACH)
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    server = ServerProcess(*FLAGS, "--enable-sleep-mode", "--server-dev-mode", *FORMS[request.param])
    url = server.wait_until_ready()
    if request.param == "-asc":
        server.wait_for(r"Serving \S+ on http")
    limits = httpx.Limits(max_keepalive_connections=0)  # each request may reach another API server
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, limits=limits) as client:
        yield client
    server.close()


def text(client: httpx.Client, **more: Any) -> str:
    answer = client.post("/v1/completions", json=BODY | more)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def error(answer: httpx.Response) -> tuple[int, str, str]:
    found = answer.json()["error"]
    return answer.status_code, found["type"], found["message"]


def test_the_metrics_say_how_deep(client: httpx.Client) -> None:
    """The text of /metrics is kept for half a second, so it is asked until it is so."""

    def until(state: str) -> None:
        wait_until(lambda: states(client) == {state}, f"the metrics do not say {state}")

    until("awake")
    for asked, state in (("1", "weights_offloaded"), ("2", "discard_all"), ("1", "discard_all")):
        client.post(f"/sleep?level={asked}")
        until(state)
    client.post("/wake_up?tags=weights")
    until("discard_all")
    client.post("/wake_up")
    until("awake")
    client.post("/sleep")
    until("weights_offloaded")
    client.post("/wake_up")
    until("awake")


def states(client: httpx.Client) -> set[str]:
    """Of all engines; each has one."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    [family] = [each for each in families if each.name == "vllm:engine_sleep_state"]
    on = [sample.labels for sample in family.samples if sample.value == 1]
    assert len({labels["engine"] for labels in on}) == len(on) == len(family.samples) // 3
    return {labels["sleep_state"] for labels in on}


def test_it_sleeps_and_wakes_up(client: httpx.Client) -> None:
    expected = text(client)
    for level in ("", "?level=1", "?level=2"):
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        assert client.post(f"/sleep{level}").status_code == 200
        assert client.post(f"/sleep{level}").status_code == 200
        for parts in ("weights", "kv_cache"):
            assert [client.get("/is_sleeping").json() for _ in range(4)] == 4 * [{"is_sleeping": True}]
            assert client.get("/health").status_code == 200
            first, *_ = events(client.post("/v1/completions", json=BODY | {"stream": True}).text)
            assert first["error"]["code"] == 429 and "The engine sleeps" in first["error"]["message"]
            for body in (BODY, BODY | {"n": 2, "temperature": 1}):
                refused = client.post("/v1/completions", json=body)
                status, kind, message = error(refused)
                assert (status, kind) == (429, "RateLimitError") and "The engine sleeps; wake it up" in message
                assert refused.headers["retry-after"]
            assert client.post(f"/wake_up?tags={parts}").status_code == 200
        assert [text(client) for _ in range(4)] == 4 * [expected]
    assert client.post("/sleep").status_code == 200
    assert client.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert text(client) == expected


def test_what_cannot_be_done(client: httpx.Client) -> None:
    assert error(client.post("/wake_up")) == (409, "ConflictError", "The engine is awake: there is nothing to wake up.")
    for query in (
        "/sleep?level=0",
        "/sleep?level=3",
        "/sleep?level=x",
        "/wake_up?tags=dreams",
        "/wake_up?tags=weights&tags=weights&tags=weights",
    ):
        assert error(client.post(query))[:2] == (400, "Bad Request"), query
    assert text(client)


def test_under_load_it_stays_awake(client: httpx.Client) -> None:
    long = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE, trust_env=False) as other:
            status, kind, message = error(other.post("/sleep"))
            assert (status, kind) == (409, "ConflictError") and "cannot fall asleep while requests run" in message
            assert other.get("/is_sleeping").json() == {"is_sleeping": False}
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_other_methods_are_refused(client: httpx.Client) -> None:
    for method, path in ROUTES:
        assert client.request("GET" if method == "POST" else "POST", path).status_code == 405, path


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
@pytest.mark.parametrize("dev_mode", [False, True])
def test_without_the_flags_there_are_no_such_routes(
    make_server: Callable[..., InProcessServer], route: tuple[str, str], dev_mode: bool
) -> None:
    answer = make_server(server_dev_mode=dev_mode).request(*route)
    assert (
        error(answer)[:2] == (404, "NotFoundError") and "--enable-sleep-mode, and --server-dev-mode" in error(answer)[2]
    )


def test_whoever_is_refused_has_ended_in_the_recording(tmp_path: Path) -> None:
    """Alone, of several prompts, in a stream, and in the words of each API."""
    server = ServerProcess(*FLAGS, "--enable-sleep-mode", "--server-dev-mode", "--trace", str(tmp_path))
    url = server.wait_until_ready()
    chat = {"model": "gpt2-tiny", "messages": [{"role": "user", "content": "To be"}], "max_tokens": 4}
    bodies = {
        "/v1/completions": BODY | {"prompt": ["To be", "or not"]},
        "/v1/chat/completions": chat,
        "/v1/responses": {"model": "gpt2-tiny", "input": "To be"},
        "/v1/messages": chat,
    }
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        assert client.post("/sleep").status_code == 200
        for path, body in bodies.items():
            assert client.post(path, json=body).status_code == 429, path
            assert "The engine sleeps" in client.post(path, json=body | {"stream": True}).text, path
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    server.close()
    assert [str(finding) for finding in check(tmp_path).findings] == []
    refused = [event.req for event in read_run(tmp_path).named("request.refused")]
    assert len(refused) == 8
    with pytest.raises(TraceError, match="was refused before it was queued in an engine"):
        find_request(tmp_path, refused[0])
