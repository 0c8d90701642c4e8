"""The flags of the HTTP server, each seen from outside."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from server_under_test import InProcessServer, ServerProcess

from stage02_server.cli_args import FrontendArgs, add_serve_args, resolve_serve_args
from stage02_server.features.hardening.unix_socket import create_server_unix_socket
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError, StagesError

ECHO = ("gpt2-tiny", "--engine", "echo", "--port", "0")
COMPLETIONS = "/v1/completions"
HEADER_BYTES, HEADERS, BODY_BYTES = 2000, 20, 5000
MakeServer = Callable[..., InProcessServer]


# --- TLS, limits of the header, logs: with sockets


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl on this machine to make a certificate with")
    return cert, key


@pytest.fixture(scope="module")
def tls_server(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cert, key = certificate
    log = tmp_path_factory.mktemp("log") / "log.json"
    handler = {"class": "logging.FileHandler", "filename": str(log.with_suffix(".txt")), "formatter": "plain"}
    formatter = {"format": "own %(levelname)s %(name)s %(message)s"}
    root = {"handlers": ["file", "err"], "level": "INFO"}
    err = {"class": "logging.StreamHandler"}
    handlers, formatters = {"file": handler, "err": err}, {"plain": formatter}
    log.write_text(json.dumps({"version": 1, "handlers": handlers, "formatters": formatters, "root": root}))
    server = ServerProcess(
        *ECHO, "--host", "127.0.0.1", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--log-config-file",
        str(log), "--h11-max-incomplete-event-size", str(HEADER_BYTES), "--h11-max-header-count", str(HEADERS),
        "--max-request-bytes", str(BODY_BYTES), "--enable-log-requests", "--max-log-len", "4",
        "--disable-access-log-for-endpoints", "/health,/version", "--forwarded-allow-ips", "10.0.0.0/8, 127.0.0.1",
    )  # fmt: skip
    server.url = server.wait_for(r"Serving \S+ on (https://\S+)$")[1]
    server.log = log.with_suffix(".txt")  # type: ignore[attr-defined]
    yield server
    server.close()


@pytest.fixture(scope="module")
def tls(tls_server: ServerProcess, certificate: tuple[Path, Path]) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(base_url=tls_server.url, verify=context) as client:
        yield client


def on_the_wire(url: str, data: bytes, cert: Path) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    host, port = url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=str(cert))
    raw = socket.create_connection((host, int(port)), timeout=PATIENCE)
    with context.wrap_socket(raw, server_hostname=host) as secured:
        secured.sendall(data)
        answer = b""
        while piece := secured.recv(65536):
            answer += piece
    return answer


def test_https_is_served_and_plain_http_is_not(tls: httpx.Client, tls_server: ServerProcess) -> None:
    assert tls.get("/health").status_code == 200
    assert tls.post(COMPLETIONS, json={"prompt": "To be", "max_tokens": 2}).json()["choices"][0]["text"] == "To be"
    with pytest.raises(httpx.HTTPError):
        httpx.get(tls_server.url.replace("https", "http") + "/health")
    with pytest.raises(httpx.ConnectError):
        httpx.get(tls_server.url + "/health")  # nobody known has signed this certificate


def test_the_log_goes_where_the_file_says_and_is_cut(tls: httpx.Client, tls_server: ServerProcess) -> None:
    tls.post(COMPLETIONS, json={"prompt": "line one\nline two", "max_tokens": 1}, headers={"X-Request-Id": "mine"})
    log = tls_server.log.read_text().splitlines()  # type: ignore[attr-defined]
    assert all(line.startswith("own ") for line in log)
    [line] = [line for line in log if "Received request cmpl-mine" in line]
    assert "prompt: 'line'" in line and "line one" not in line and "max_tokens=1" in line


def test_requests_to_some_paths_get_no_line(tls: httpx.Client, tls_server: ServerProcess) -> None:
    for path in ("/health", "/version?x=1", "/v1/models?x=1"):
        assert tls.get(path).status_code == 200
    log = tls_server.log.read_text()  # type: ignore[attr-defined]
    assert "GET /v1/models?x=1 " in log and "GET /health" not in log and "GET /version" not in log


def test_a_proxy_that_is_believed_names_the_client(tls: httpx.Client, tls_server: ServerProcess) -> None:
    """What it says is no address: then it stands in quotes, and could not be taken for the beginning of another line's text."""
    given = {
        "/v1/a": "192.0.2.7",
        "/v1/b": "6.6.6.6, 192.0.2.8, 10.3.2.1",
        "/v1/c": '6.6.6.6:1 - "GET /c HTTP/1.1" 200\x9b\xff',
    }
    for path, client in given.items():
        tls.get(path, headers={"X-Forwarded-For": client.encode("latin-1")})  # type: ignore[dict-item]
    log = tls_server.log.read_text().splitlines()  # type: ignore[attr-defined]
    [a, b, c] = [next(line for line in log if f"GET {path} " in line) for path in given]
    assert "192.0.2.7:0 - " in a and "192.0.2.8:0 - " in b
    assert c.startswith("own INFO uvicorn.access '6.6.6.6:1 - ") and c.isprintable() and "\\x9b" in c


def request_bytes(*headers: bytes, target: bytes = b"/health") -> bytes:
    return b"\r\n".join([b"GET " + target + b" HTTP/1.1", b"Host: x", *headers, b"Connection: close", b"\r\n"])


TOO_MUCH = {
    "one header": request_bytes(b"a: " + b"x" * HEADER_BYTES),
    "a header that does not end": b"GET / HTTP/1.1\r\na: " + b"x" * 200_000,
    "a name that does not end": b"GET / HTTP/1.1\r\n" + b"x" * 200_000,
    "a target that does not end": b"GET /" + b"x" * 200_000,
    "a target that is sent for long": b"GET /" + b"x" * 5_000_000,
    "a long target": request_bytes(target=b"/" + b"x" * HEADER_BYTES),
    "many small headers": request_bytes(*[b"a%d: 1" % i for i in range(HEADERS)]),
    "many equal headers": request_bytes(*[b"a: 1"] * HEADERS),
    "trailers": b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: 1\r\n" * 99 + b"\r\n",
    "a trailer that does not end": b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: "
    + b"x" * 200_000,
    "a chunk extension that does not end": b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;"
    + b"x" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("data", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_header_beyond_the_limits(tls_server: ServerProcess, tls: httpx.Client, data: bytes, certificate: Any) -> None:
    answer = on_the_wire(tls_server.url, data, certificate[0])
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert b"HTTP/1.1 431 " in head, answer[:300]
    error = json.loads(body)["error"]
    assert error["code"] == 431
    assert all(flag in error["message"] for flag in ("--h11-max-header-count", "--h11-max-incomplete-event-size"))
    assert tls.get("/health").status_code == 200


def test_header_within_the_limits_and_no_http_at_all(tls_server: ServerProcess, certificate: Any) -> None:
    used = len(b"/health" + b"host" + b"x" + b"connection" + b"close" + b"b")
    for num_bytes, status in ((HEADER_BYTES - used, b"200"), (HEADER_BYTES - used + 1, b"431")):
        request = request_bytes(b"b: " + b"x" * num_bytes)
        assert b"HTTP/1.1 " + status in on_the_wire(tls_server.url, request, certificate[0])
    for fields, status in ((HEADERS - 2, b"200"), (HEADERS - 1, b"431")):  # beside Host and Connection
        request = request_bytes(*[b"a%d: 1" % i for i in range(fields)])
        assert b"HTTP/1.1 " + status in on_the_wire(tls_server.url, request, certificate[0])
    assert b"HTTP/1.1 400" in on_the_wire(tls_server.url, b"\x16\x03\x01 no HTTP\r\n\r\n", certificate[0])


@given(size=st.integers(BODY_BYTES - 3, BODY_BYTES + 3) | st.integers(1, 3 * BODY_BYTES), chunked=st.booleans())
def test_body_limit_is_exact(size: int, chunked: bool, tls: httpx.Client) -> None:
    empty = json.dumps({"prompt": "", "max_tokens": 1})
    body = empty.replace('""', json.dumps("x" * (size - len(empty)))).encode()
    content = iter([body[:100], body[100:]]) if chunked else body
    response = tls.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    too_large = len(body) > BODY_BYTES
    assert (response.status_code == 413) == too_large, (len(body), response.text)
    if too_large:
        error = response.json()["error"]
        assert error["type"] == HTTPStatus(413).phrase and "--max-request-bytes" in error["message"]


# --- the other flags: in this process


def test_a_length_that_is_no_number_is_refused(server: InProcessServer) -> None:
    for length in ("-1", "1e9", "9" * 5000, "²"):
        headers = {"Content-Type": "application/json", "Content-Length": length.encode()}
        assert server.request("POST", COMPLETIONS, content=b"{}", headers=headers).status_code == 413, length  # type: ignore[arg-type]


def test_more_items_than_anybody_needs_are_refused_before_they_are_looked_at(server: InProcessServer) -> None:
    many: dict[str, Any] = {
        "stop": ["x"] * 70_000, "logit_bias": {str(i): 0 for i in range(70_000)}, "tools": [[[1] * 70_000]],
        "vllm_xargs": {"a": [1] * 70_000}, "no_such_field": [[i] for i in range(70_000)],
    }  # fmt: skip
    for name, value in many.items():
        error = server.post(COMPLETIONS, {"prompt": "x", name: value}).json()["error"]
        assert (error["code"], error["param"]) == (400, name) and "65536 items" in error["message"]
    for prompt in (["a"] * 4097, [[1]] * 4097):
        assert server.post(COMPLETIONS, {"prompt": prompt}).json()["error"]["param"] == "body.prompt"
    assert server.client.added == []  # type: ignore[attr-defined]


def test_cors_is_for_the_named_sites(make_server: MakeServer) -> None:
    server = make_server(allowed_origins=("https://good.example",), allow_credentials=True, api_key=("k",))
    ask = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    preflight = server.request("OPTIONS", COMPLETIONS, headers=ask)  # brings no key: browsers send none here
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-credentials"] == "true"
    assert server.request("OPTIONS", COMPLETIONS, headers=ask | {"Origin": "https://bad.example"}).status_code == 400
    refused = server.request("GET", "/v1/models", headers=ask)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://good.example"
    other = server.request("GET", "/health", headers={"Origin": "https://bad.example"})
    assert "access-control-allow-origin" not in other.headers
    plain = make_server().request("GET", "/health", headers=ask)
    assert not any(name.startswith("access-control") for name in plain.headers)


def test_root_path(make_server: MakeServer) -> None:
    server = make_server(root_path="/llm/")
    for path in ("/llm/v1/models", "/v1/models"):  # a proxy may strip the prefix or leave it
        assert server.request("GET", path).status_code == 200
    assert server.post("/llm/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["id"].startswith("cmpl-")
    assert server.request("GET", "/llmv1/models").status_code == 404
    assert server.request("GET", "/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_request_id_headers(make_server: MakeServer) -> None:
    server = make_server(enable_request_id_headers=True, api_key=("k",))
    body, key = {"prompt": "x", "max_tokens": 1}, {"Authorization": "Bearer k"}
    mine = server.post(COMPLETIONS, body, headers=key | {"X-Request-Id": "a.b-1"})
    assert mine.headers["x-request-id"] == "a.b-1" and mine.json()["id"] == "cmpl-a.b-1"
    for odd in ("", "x" * 200, "a b", "\u00e9", "<script>"):
        other = server.post(COMPLETIONS, body, headers=key | {"X-Request-Id": odd.encode()})  # type: ignore[dict-item]
        assert other.json()["id"] == "cmpl-" + other.headers["x-request-id"] and other.headers["x-request-id"] != odd
    assert len(server.post(COMPLETIONS, body).headers["x-request-id"]) == 32  # a refusal has one too
    assert "x-request-id" not in make_server().post(COMPLETIONS, body, headers={"X-Request-Id": "a"}).headers


def test_docs_can_be_switched_off(make_server: MakeServer) -> None:
    for server, status in ((make_server(), 200), (make_server(disable_fastapi_docs=True), 404)):
        assert {server.request("GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {status}


class Stamp:
    """ASGI middleware of a user."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-stamp", b"1"))
            await send(message)

        await self.app(scope, receive, stamped)


async def turn_away(request: Any, call_next: Any) -> Any:
    """A middleware function of a user."""
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("away", 418) if request.url.path == "/version" else await call_next(request)


not_callable = 5


def test_middleware_of_ones_own(make_server: MakeServer) -> None:
    server = make_server(middleware=(f"{__name__}.Stamp", f"{__name__}:turn_away"))
    assert server.request("GET", "/health").headers["x-stamp"] == "1"
    assert server.request("GET", "/version").text == "away"
    whole = server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "stream": True})
    assert whole.text.endswith("data: [DONE]\n\n")
    for wrong in ("no_such_module.X", f"{__name__}.Missing", "noname", f"{__name__}.not_callable", ".x", ""):
        with pytest.raises(ConfigError, match="--middleware"):
            make_server(middleware=(wrong,))


def resolved(*words: str) -> FrontendArgs:
    parser = FlexibleArgumentParser()
    add_serve_args(parser)
    return resolve_serve_args(parser.parse_args(words)).frontend_args


def test_lists_of_flags() -> None:
    assert resolved("--api-key", "a", "b").api_key == ("a", "b")
    assert resolved("--middleware", "a.B", "--middleware", "c.D").middleware == ("a.B", "c.D")
    assert resolved("--allowed-origins", '["https://a", "https://b"]').allowed_origins == ("https://a", "https://b")


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGES_API_KEY", "from-env")
    assert resolved().api_key == ("from-env",)
    monkeypatch.setenv("STAGES_API_KEY", '["one", "two"]')
    assert resolved().api_key == ("one", "two")
    monkeypatch.setenv("STAGES_API_KEY", '["hidden", ""]')
    with pytest.raises(ConfigError, match="STAGES_API_KEY") as refused:
        resolved()
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"api_key": ("schlüssel",)}, "api_key"),
        ({"api_key": ("two words\n",)}, "api_key"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/<script>"}, "root_path"),
        ({"root_path": "/a'b"}, "root_path"),
        ({"forwarded_allow_ips": "proxy.example.org"}, "forwarded_allow_ips"),
        ({"forwarded_allow_ips": "10.0.0.1,,::1"}, "forwarded_allow_ips"),
        ({"forwarded_allow_ips": "10.0.0.1/8"}, "forwarded_allow_ips"),
        ({"forwarded_allow_ips": "*,10.0.0.1"}, "forwarded_allow_ips"),
        ({"max_pipelined_requests": 0}, "max_pipelined_requests must be at least 1, not 0"),
        ({"max_audio_seconds": 0}, "max_audio_seconds must be at least 1, not 0"),
        ({"max_request_items": 1023}, "max_request_items"),
        ({"max_settings_bytes": 1023}, "max_settings_bytes"),
        ({"max_tokenize_characters": 0}, "max_tokenize_characters"),
        ({"max_request_templates": 0}, "max_request_templates"),
        ({"max_request_logprobs": 0}, "max_request_logprobs"),
        ({"engine_stall_seconds": -1.0}, "engine_stall_seconds"),
        ({"response_stall_timeout": -1}, "response_stall_timeout"),
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "allow_credentials"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "x"}, "ssl_ca_certs"),
        ({"ssl_keyfile": "key.pem"}, "ssl_certfile"),
        ({"ssl_certfile": "/no/such/file"}, "/no/such/file"),
        ({"ssl_certfile": __file__}, "for TLS"),
        ({"h11_max_header_count": 1}, "h11_max_header_count"),
        ({"h11_max_incomplete_event_size": 0}, "h11_max_incomplete_event_size"),
        ({"max_request_bytes": -1}, "max_request_bytes"),
        ({"max_log_len": -1}, "max_log_len"),
    ],
    ids=str,
)
def test_impossible_flags(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        FrontendArgs(**wrong).check()
    assert not any(key in str(refused.value) for key in wrong.get("api_key", ()))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1, "root": {"handlers": ["none"]}}', None])
def test_a_log_config_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    from stage03_engine.args.features.log_config.log_config import load_log_config

    if content is not None:
        (tmp_path / "log.json").write_text(content)
    with pytest.raises(ConfigError, match="log_config_file"):
        load_log_config(str(tmp_path / "log.json"))


def test_uds(tmp_path: Path, start_server: Callable[..., ServerProcess]) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left:  # as a server leaves it that was killed
        left.bind(str(path))
    server = start_server(*ECHO, "--uds", str(path))
    server.wait_for(rf"Serving \S+ on unix:{path}")
    with pytest.raises(StagesError, match="uds"):
        create_server_unix_socket(FrontendArgs(uds=str(path)))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
        assert client.get("/health").status_code == 200
        assert client.post(COMPLETIONS, json={"prompt": "To be", "max_tokens": 1}).status_code == 200
    server.process.terminate()
    assert server.wait() == 0 and not path.exists()


def test_uds_of_another_server_stays_and_is_never_taken(tmp_path: Path) -> None:
    """Also while that one does not serve yet. One that ends removes its own file only, not that of its successor."""
    flags = FrontendArgs(uds=str(tmp_path / "s.sock"))
    _, first = create_server_unix_socket(flags)
    with pytest.raises(StagesError, match="in use"):
        create_server_unix_socket(flags)
    (tmp_path / "s.sock").unlink()
    _, second = create_server_unix_socket(flags)
    first.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s.sock"))
    second.close()
    assert not list(tmp_path.iterdir())


def test_uds_takes_no_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    for path in (tmp_path / "precious", tmp_path, tmp_path / ("x" * 200), "a\0b"):
        with pytest.raises(StagesError, match="uds"):
            create_server_unix_socket(FrontendArgs(uds=str(path)))
    assert (tmp_path / "precious").read_text() == "data"
