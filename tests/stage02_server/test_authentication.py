"""`--api-key`: what is closed is closed however it is spelled, and the key itself is nowhere to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given, strategies as st
from server_under_test import InProcessServer

from stage01_cli.main import main
from stage02_server.api_server import served_paths
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.authentication import OPEN_PATHS
from stage03_engine.args.fields import Setting, settings_of

KEYS = ("first-key", "second-key")
Headers = list[tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def locked() -> Iterator[InProcessServer]:
    server = InProcessServer(api_key=KEYS, enable_engine_events=True)
    yield server
    server.close()


def call(server: InProcessServer, raw_path: str, headers: Headers, method: str = "GET") -> tuple[int, dict[str, str]]:
    """Status and headers, for a request target exactly as it stands on the wire."""
    path, _, query = raw_path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": headers, "server": ("test", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    server.run(server.app(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def bearer(key: str) -> Headers:
    return [(b"authorization", f"Bearer {key}".encode())]


def concrete(path: str) -> str:
    return path.replace("{name:path}", "byte-model").replace("{", "").replace("}", "")


def all_paths(server: InProcessServer) -> list[str]:
    return sorted(map(concrete, served_paths(server.app.routes)))  # those that wait for their first request too


def test_every_route_is_closed_but_the_open_ones(locked: InProcessServer) -> None:
    paths = all_paths(locked)
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health", "/metrics"} <= set(paths)
    for path in paths:
        for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
            status, headers = call(locked, path, [], method)
            assert (status == 401) == (path not in OPEN_PATHS), (method, path, status)
            if status == 401:
                assert headers["www-authenticate"] == "Bearer"
    assert not any(path.startswith("/v1") for path in OPEN_PATHS)
    assert call(locked, "/health", [])[0] == call(locked, "/metrics", [])[0] == 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_opens(locked: InProcessServer, key: str, scheme: str) -> None:
    assert call(locked, "/v1/models", [(b"authorization", f"{scheme} {key}".encode())])[0] == 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("more", [[], bearer("not-ours")], ids=str)
def test_each_key_opens_as_clients_of_anthropic_send_it(locked: InProcessServer, key: str, more: Headers) -> None:
    """They send a bearer token as well where the environment has one, which may be meant for somebody else."""
    assert call(locked, "/v1/models", [(b"x-api-key", key.encode()), *more])[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("first-ke"),
        bearer("first-keyy"),
        bearer("FIRST-KEY"),
        bearer("first-key,second-key"),
        [(b"authorization", b"first-key")],
        [(b"authorization", b"Basic first-key")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", b"Bearer wrong"), *bearer("first-key")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"first-ke")],
        [(b"x-api-key", b"Bearer first-key")],
        [(b"x-api-key", b"first-key"), (b"x-api-key", b"first-key")],
        [(b"x-api-key", b"wrong"), *bearer("wrong")],
        [(b"x-api-key", b"wrong"), (b"authorization", b"Basic first-key")],
        [(b"cookie", b"authorization=Bearer first-key")],
    ],
    ids=str,
)
def test_nothing_else_opens(locked: InProcessServer, headers: Headers) -> None:
    assert call(locked, "/v1/models", headers)[0] == 401
    assert call(locked, "/v1/models?api_key=first-key", headers)[0] == 401


def test_a_refusal_is_an_error_object_without_the_key(locked: InProcessServer) -> None:
    response = locked.post("/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer not-the-key"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (401, "AuthenticationError", 401)
    assert not any(word in response.text for word in ("not-the-key", *KEYS))
    assert locked.client.added == []  # type: ignore[attr-defined]


def spelled(draw: Callable[..., Any], path: str) -> str:
    """The same path, some of its characters percent-encoded."""
    return "".join(f"%{ord(c):02x}" if draw(st.booleans()) else c for c in path)


@given(
    path=st.sampled_from(["/v1/models", "/v1/models/byte-model", "/tokenize", "/reset_prefix_cache"]),
    tail=st.sampled_from(
        ["", "/", "?", "?/health", "#/health", "/../health", "/./", ";/health", "%2f..%2f..%2fhealth"]
    ),
    head=st.sampled_from(["", "/", "/.", "/health/..", "/health/../", "//health"]),
    host=st.sampled_from([b"test", b"test/health?", b"test/health#", b"/health?x=", b"x@y/health", b""]),
    root=st.sampled_from(["", "/llm", "/health", "/v1"]),
    data=st.data(),
)
def test_no_spelling_and_no_host_gets_in(path: str, tail: str, head: str, host: bytes, root: str, data: Any) -> None:
    server = servers_by_root(root)
    raw_path = data.draw(st.sampled_from(["", root])) + head + spelled(data.draw, path) + tail
    forwarded = [(b"host", host), (b"x-forwarded-prefix", b"/health"), (b"x-original-url", b"/health")]
    status, _ = call(server, raw_path, forwarded)
    assert status in (401, 404), raw_path  # never what a handler answers
    assert status == 401 or unquote(raw_path.partition("?")[0]).removeprefix(root) in OPEN_PATHS


_servers: dict[str, InProcessServer] = {}


def servers_by_root(root: str) -> InProcessServer:
    if root not in _servers:
        _servers[root] = InProcessServer(api_key=KEYS, root_path=root or None)
    return _servers[root]


@pytest.fixture(scope="module", autouse=True)
def _close_servers() -> Iterator[None]:
    yield
    while _servers:
        _servers.popitem()[1].close()


def test_with_a_key_everything_is_as_without_one(locked: InProcessServer, server: InProcessServer) -> None:
    for path in [*all_paths(server), "/nowhere", "/v1/models/unknown", "/v1/%63ompletions"]:
        for method in ("GET", "POST", "OPTIONS"):
            assert call(locked, path, bearer(KEYS[0]), method)[0] == call(server, path, [], method)[0], (method, path)


def test_the_settings_do_not_show_the_key() -> None:
    assert KEYS[0] not in repr(FrontendArgs(api_key=KEYS))


PROTECTING = [setting for setting in settings_of(FrontendArgs) if setting.protects]


def test_what_protects_is_marked() -> None:
    assert {"api_key", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "lora_root"} == {
        each.name for each in PROTECTING
    }


@pytest.mark.parametrize("setting", PROTECTING, ids=[setting.name for setting in PROTECTING])
def test_an_empty_text_does_not_leave_open_what_was_to_be_closed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--uds "$SOCKET"`, or `STAGES_API_KEY=${SECRET}` in a compose file, with a variable that is not set."""
    config = tmp_path / "config.yaml"
    config.write_text(f"{setting.name}: ''")
    for words in ([setting.flag, ""], [f"{setting.flag}="], ["--config", str(config)]):
        assert main(["serve", "gpt2-tiny", "--dry-run", *words]) == 2, words
    variables = [setting.variable] + ["VLLM_API_KEY"] * (setting.name == "api_key")
    for variable in variables:
        with monkeypatch.context() as patched:
            patched.setenv(variable, "")
            capsys.readouterr()
            assert main(["serve", "gpt2-tiny", "--dry-run"]) == 2
            assert variable in capsys.readouterr().err
