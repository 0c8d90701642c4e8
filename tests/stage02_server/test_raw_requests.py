"""Requests that no HTTP library sends: two of them in one, spelled oddly, broken off. None gets past the key, none gets an
answer that was meant for another, and the server goes on."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from server_under_test import ServerProcess

KEY = b"Authorization: Bearer the-key\r\n"
CLOSE = b"Connection: close\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"  # a second request, inside what should be a body


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(
        "gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", "--api-key", "the-key",
        "--request-header-timeout", "1", "--request-body-timeout", "1",
    )  # fmt: skip
    server.wait_until_ready()
    yield server
    server.close()


def post(*headers: bytes, body: bytes = BODY, length: bytes | None = None, version: bytes = b"1.1") -> bytes:
    length = b"%d" % len(body) if length is None else length
    lines = [b"Host: x\r\nContent-Type: application/json\r\n", KEY, CLOSE, *headers]
    lines += [b"Content-Length: " + length + b"\r\n"] if length else []
    return b"POST /v1/completions HTTP/" + version + b"\r\n" + b"".join(lines) + b"\r\n" + body


def get(target: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    return b"GET " + target + b" HTTP/" + version + b"\r\nHost: x\r\n" + CLOSE + b"".join(headers) + b"\r\n"


CHUNKED = b"Transfer-Encoding: chunked\r\n"
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
REQUESTS: dict[str, tuple[bytes, str]] = {
    "plain": (post(), "200"),
    "in chunks": (post(CHUNKED, body=IN_CHUNKS, length=b""), "200"),
    "HTTP/1.0": (post(version=b"1.0"), "200"),
    "HTTP/1.0 without Host": (b"GET /v1/models HTTP/1.0\r\n\r\n", "401"),
    "three at once, the second without key": (post().replace(CLOSE, b"") + HIDDEN + post(), "200 401 200"),
    "one more behind the last": (post() + HIDDEN, "200"),
    # Two ideas of how long the body is
    "length and chunks": (post(CHUNKED, body=b"0\r\n\r\n" + HIDDEN), "400"),
    "two lengths": (post(b"Content-Length: 5\r\n"), "400"),
    "the same length twice": (post(b"Content-Length: %d\r\n" % len(BODY)), "400"),
    "a list of lengths": (post(length=b"5, 5"), "400"),
    "a signed length": (post(length=b"+5"), "400"),
    "a length below nothing": (post(length=b"-1"), "400"),
    "a length in hexadecimal": (post(length=b"0x20"), "400"),
    "a length beyond 64 bits": (post(length=b"9" * 20), "400"),
    "chunks by another name": (post(b"Transfer-Encoding: xchunked\r\n", length=b""), "400"),
    "chunks, but not last": (post(b"Transfer-Encoding: chunked, gzip\r\n", length=b""), "400"),
    "a space before the colon": (post(b"Transfer-Encoding : chunked\r\n", body=IN_CHUNKS, length=b""), "400"),
    "no size of a chunk": (post(CHUNKED, body=b"zz\r\n", length=b""), "400"),
    "a negative chunk": (post(CHUNKED, body=b"-1\r\n", length=b""), "400"),
    "a huge chunk": (post(CHUNKED, body=b"f" * 17 + b"\r\n", length=b""), "400"),
    "more than the chunk says": (post(CHUNKED, body=b"5\r\nhello world\r\n0\r\n\r\n", length=b""), "400"),
    "line feeds only": (post(CHUNKED, body=IN_CHUNKS, length=b"").replace(b"\r\n", b"\n"), "400"),
    # Targets
    "absolute": (get(b"http://x/v1/models"), "401"),
    "absolute, through an open path": (get(b"http://x/health/../v1/models"), "401"),
    "an open path as the host": (get(b"http://health/v1/models"), "401"),
    "dots": (get(b"/health/../v1/models"), "401"),
    "encoded dots": (get(b"/health/%2e%2e/v1/models"), "401"),
    "encoded slash": (get(b"/v1%2fmodels"), "401"),
    "two slashes": (get(b"//v1/models"), "401"),
    "a parameter": (get(b"/health;/v1/models"), "401"),
    "encoded NUL": (get(b"/health%00/v1/models"), "401"),
    "backslashes": (get(b"/health\\..\\v1/models"), "401"),
    "letters encoded": (get(b"/%76%31/models"), "401"),
    "encoded twice": (get(b"/%2576%2531/models"), "401"),
    "no UTF-8": (get(b"/%ff%fe"), "401"),
    "a raw byte": (get(b"/\xff"), "400"),
    "for a proxy": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", "400"),
    "for everybody": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", "401"),
    "two hosts": (get(b"/v1/models", b"Host: y/health\r\n"), "401"),
    # Headers
    "a folded key": (get(b"/v1/models", b"Authorization: Bearer\r\n the-key\r\n"), "400"),
    "two keys": (get(b"/v1/models", KEY, KEY), "401"),
    "NUL in a value": (get(b"/health", b"A: b\0c\r\n"), "400"),
    "space in a name": (get(b"/health", b"A b: c\r\n"), "400"),
    "no name": (get(b"/health", b": c\r\n"), "400"),
    "upgrade": (get(b"/v1/models", b"Upgrade: websocket\r\n"), "401"),
    "another protocol": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400"),
    "a version that is none": (get(b"/v1/models", version=b"9.9"), "400"),
    # Bodies
    "compressed": (post(b"Content-Encoding: gzip\r\n", body=gzip.compress(BODY)), "415"),
    "compressed a million times": (post(b"Content-Encoding: " + b" ," * 10**6 + b"\r\n"), "415"),
    "compressed twice": (post(b"Content-Encoding: identity, BR\r\n"), "415"),
    "a surrogate": (post(body=b'{"prompt": "\\ud800", "max_tokens": 1}'), "400"),
    "a key twice": (post(body=b'{"prompt": "x", "max_tokens": 1, "max_tokens": {}}'), "400"),
    "a long integer": (post(body=b'{"prompt": "x", "seed": %s}' % (b"9" * 5000)), "400"),
}  # fmt: skip


def talk(server: ServerProcess, data: bytes) -> bytes:
    """What comes back until the server closes the connection, which it does for all of these."""
    url, answer = httpx.URL(server.url), b""
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as client, contextlib.suppress(OSError):
        client.sendall(data)
        while piece := client.recv(65536):
            answer += piece
    return answer


def statuses(answer: bytes) -> list[str]:
    return [status.decode() for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.mark.parametrize("name", REQUESTS)
def test_answers(server: ServerProcess, name: str) -> None:
    data, expected = REQUESTS[name]
    answer = talk(server, data)
    assert statuses(answer) == expected.split(), answer
    if expected[0] == "4":
        assert set(json.loads(answer[answer.rindex(b'{"error"') :])["error"]) == {"message", "type", "param", "code"}


@given(data=st.data())
def test_what_is_mixed_from_such_parts_never_gets_in(server: ServerProcess, data: st.DataObject) -> None:
    """No request here has the key: only what is open may be answered with a 200."""
    parts = [
        b"GET ", b"POST ", b"/v1/models", b"/tokenize", b"/../", b"%2e%2e/", b"//", b";", b"http://x", b" HTTP/1.1", b" HTTP/1.0",
        b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"Host: x", b"Content-Length: 5", CHUNKED, b"0\r\n\r\n", b"5\r\nhello\r\n", BODY, b"\0",
        b"Authorization: Bearer ", b"Upgrade: h2c\r\nConnection: Upgrade", b"Expect: 100-continue", HIDDEN, b"?", b"#", b":", b" ", b"\xff",
    ]  # fmt: skip
    answer = talk(server, b"".join(data.draw(st.lists(st.sampled_from(parts), max_size=12))) + b"\r\n\r\n\0\r\n")
    assert set(statuses(answer)) <= {"400", "401", "404", "405", "408", "100"}, answer
    assert server.process.poll() is None


def test_nothing_of_it_was_a_defect(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not any("Traceback" in line or "ERROR" in line for line in server.lines)
