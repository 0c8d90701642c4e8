"""What every endpoint promises that gives a model work, each promise for each endpoint, whole and streamed.

`endpoints.py` has a request for every one; an endpoint that is added later needs one there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from endpoints import ENDPOINTS, ask
from server_under_test import InProcessServer, RecordingEcho, all_prefixes

from stage03_engine.errors import EngineDeadError
from stage03_engine.messages import EngineCoreOutputs

PREFIXES = all_prefixes()
TWINS = {
    "/v1/score": "/score",
    "/v1/rerank": "/rerank",
    "/v2/rerank": "/rerank",
    "/v1/audio/translations": "/v1/audio/transcriptions",
}
"""Answered by the same function as another."""


def row(path: str, *more: Any, name: str = "") -> Any:
    return pytest.param(path, *more, id=path + name, marks=[pytest.mark.slow] * (path in TWINS))


EACH = pytest.mark.parametrize("path", [row(path) for path in ENDPOINTS])
EACH_FORM = pytest.mark.parametrize(
    ("path", "stream"),
    [
        row(path, stream, name=", streamed" * stream)
        for path, each in ENDPOINTS.items()
        for stream in (False, True)[: 1 + each.streams]
    ],
)
MINE = {"X-Request-Id": "mine"}
RESPONSES = "/v1/responses"
ENDS_AS_TEXT = ("/v1/completions", "/v1/chat/completions")
"""Where an answer that is aborted is one that has ended for this reason, as in vLLM."""
Make = Callable[..., InProcessServer]


@pytest.fixture
def make(make_server: Make) -> Make:
    def made(path: str, kind: type[RecordingEcho] = RecordingEcho, ticks: float = 0.0, **args: Any) -> InProcessServer:
        config = ENDPOINTS[path].config()
        return make_server(kind(ticks, config), config=config, **args)

    return made


def of(stream: bool) -> dict[str, Any]:
    return {"stream": True} if stream else {}


def says_error(answer: httpx.Response, code: int, stream: bool = False) -> str:
    """It is an error with this code, in a stream its last event; returns its message."""
    assert answer.status_code == (200 if stream else code), answer.text
    text = answer.text
    assert '"error"' in text and "Traceback" not in text and "secret" not in text
    if not stream:
        error = answer.json()["error"]
        assert error.get("code", code) == code and error["message"] and error["type"]
        return str(error["message"])
    return text


def ids(server: InProcessServer) -> list[str]:
    return [str(name) for name in server.client.added]  # type: ignore[attr-defined]


async def until_it_runs(server: InProcessServer) -> None:
    while not ids(server):
        await asyncio.sleep(0)


def test_every_endpoint_has_a_request() -> None:
    assert ENDPOINTS.keys() == PREFIXES.keys()


@EACH_FORM
def test_it_answers_under_the_name_that_the_client_gave(make: Make, path: str, stream: bool) -> None:
    """What the engine is asked begins with the endpoint's prefix and the header's id, which the answer has too where it has one."""
    server = make(path)
    answer = ask(server, path, MINE, **of(stream))
    assert answer.status_code == 200, answer.text
    name = PREFIXES[path] + "mine"
    if path != RESPONSES:  # nobody chooses the id of what is stored
        assert ids(server) and all(name in each for each in ids(server))
        assert "audio" in path or name in answer.text
    for odd in ("x" * 129, "a b", "é", ""):
        server.client.added.clear()  # type: ignore[attr-defined]
        assert ask(server, path, {"X-Request-Id": odd.encode()}, **of(stream)).status_code == 200  # type: ignore[dict-item]
        assert all(PREFIXES[path] in each and (not odd or odd not in each) for each in ids(server))


@EACH_FORM
def test_another_model_is_not_found(make: Make, path: str, stream: bool) -> None:
    says_error(ask(make(path), path, model="other", **of(stream)), 404)


NO_REQUESTS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": 5}',
    b'{"prompt": {}}',
    b"\xff\xfe",
    b'{"model": ' + b"[" * 100_000,
)


@EACH
def test_what_is_no_request_is_refused(make: Make, path: str) -> None:
    server = make(path)
    kind = "multipart/form-data; boundary=x" if ENDPOINTS[path].files else "application/json"
    for body in NO_REQUESTS:
        answer = server.request("POST", path, content=body, headers={"Content-Type": kind})
        says_error(answer, answer.status_code)
        assert answer.status_code in (400, 422) and not ids(server), body[:20]


@EACH_FORM
def test_a_client_that_leaves_ends_what_the_engine_does_for_it(make: Make, path: str, stream: bool) -> None:
    server = make(path, ticks=3600)  # the engine alone would never finish
    request = ENDPOINTS[path].raw(**of(stream))
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": request.content, "more_body": False}
        await until_it_runs(server)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None: ...

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": [(name.lower(), value) for name, value in request.headers.raw], "client": ("test", 1), "scheme": "http",
        "server": ("test", 80), "root_path": "",
    }  # fmt: skip
    server.run(server.app(scope, receive, send))
    assert ids(server) and sorted(server.client.aborted) == sorted(ids(server))  # type: ignore[attr-defined]
    assert not server.engine.num_unfinished_requests


@EACH_FORM
def test_what_an_operator_aborts_is_no_answer(make: Make, path: str, stream: bool) -> None:
    server = make(path, ticks=3600, server_dev_mode=True)

    async def both() -> httpx.Response:
        content = ENDPOINTS[path].content(**of(stream))
        waiting = asyncio.create_task(server.send("POST", path, headers=MINE, **content))
        await until_it_runs(server)
        own = {re.sub("-[^-]*$", "", each) for each in ids(server)} if path == RESPONSES else {PREFIXES[path] + "mine"}
        await server.send("POST", "/abort_requests", json={"request_ids": [*own]})
        return await waiting

    answer = server.run(both())
    if path in ENDS_AS_TEXT or ("audio" in path and stream):
        assert answer.status_code == 200 and '"finish_reason":"abort"' in answer.text
    elif path == RESPONSES:
        assert '"status":"failed"' in answer.text and "aborted" in answer.text
    else:
        assert "aborted" in says_error(answer, 503, stream)
    assert not server.engine.num_unfinished_requests


class Dying(RecordingEcho):
    """Dies of its first request."""

    async def get_output_async(self) -> EngineCoreOutputs:
        await super().get_output_async()
        raise EngineDeadError("killed")


@EACH_FORM
def test_a_dead_engine_is_unavailable(make: Make, path: str, stream: bool) -> None:
    server = make(path, Dying)
    first = ask(server, path, **of(stream))
    says_error(first, 503, stream and first.status_code == 200)
    says_error(ask(server, path, **of(stream)), 503)  # and no stream that only holds an error
    assert server.request("GET", "/health").status_code == 503


@EACH_FORM
def test_a_server_that_ends_takes_no_new_requests(make: Make, path: str, stream: bool) -> None:
    server = make(path)
    server.app.state.services.gate.draining = True
    says_error(ask(server, path, **of(stream)), 503)
    assert not ids(server)


@EACH_FORM
def test_a_defect_reveals_nothing_and_harms_no_other(
    make: Make, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make(path)

    async def fail(*args: Any, **how: Any) -> None:
        raise RuntimeError("secret /etc/secret")

    monkeypatch.setattr(server.client, "add_request_async", fail)
    answer = ask(server, path, **of(stream))
    says_error(answer, 500, stream and answer.status_code == 200)
    monkeypatch.undo()
    assert ask(server, path, **of(stream)).status_code == 200


@EACH
def test_it_counts_and_is_logged(make: Make, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """--enable-log-requests: a line per prompt, whatever is asked of it."""
    server = make(path, enable_log_requests=True)
    with caplog.at_level("INFO"):
        assert ask(server, path, MINE).status_code == 200
    lines = server.request("GET", "/metrics").text.splitlines()
    [tokens] = [float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total")]
    assert tokens > 0
    assert [each for each in caplog.messages if "Received request" in each]
