"""TLS: a connection counts before its handshake is complete, and has no more time for it than for a header."""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess
from test_client_certificates import make_certificate

MOST, SECONDS = 20, 2
SOCKETS = 3 * MOST


def hello() -> bytes:
    """What a client sends first."""
    sent = ssl.MemoryBIO()
    client = ssl._create_unverified_context().wrap_bio(ssl.MemoryBIO(), sent)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


BEGINNINGS = {
    "nothing": b"",
    "a byte": hello()[:1],
    "half": hello()[:100],
    "hello": hello(),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificates"), "server")


@contextmanager
def served(certificate: Path, most: int, seconds: int) -> Iterator[httpx.URL]:
    server = ServerProcess(
        "gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", "--ssl-certfile", str(certificate),
        "--max-connections", str(most), "--request-header-timeout", str(seconds),
    )  # fmt: skip
    with closing(server):
        yield httpx.URL(server.wait_for(r"Serving \S+ on (https://\S+)$")[1])


@pytest.fixture(scope="module")
def patient(certificate: Path) -> Iterator[httpx.URL]:
    """A server with few places, and more time for each than this test has."""
    with served(certificate, MOST, 3600) as url:
        yield url


@pytest.fixture(scope="module")
def roomy(certificate: Path) -> Iterator[httpx.URL]:
    """A server with places for all, for a short time."""
    with served(certificate, 100 * MOST, SECONDS) as url:
        yield url


def closed(clients: list[socket.socket]) -> int:
    """How many of them the server has closed."""
    count = 0
    for client in clients:
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ)
            while selector.select(0):
                try:
                    if client.recv(65536):
                        continue
                except OSError:
                    pass
                count += 1
                break
    return count


@contextmanager
def half_connected(url: httpx.URL, name: str) -> Iterator[list[socket.socket]]:
    """Clients who begin so, and wait. Another one is served."""
    clients = [socket.create_connection((url.host, url.port or 0)) for _ in range(SOCKETS)]
    try:
        for client in clients:
            client.sendall(BEGINNINGS[name])
        assert httpx.get(f"{url}/health", verify=False).status_code == 200
        yield clients
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("name", BEGINNINGS)
def test_who_never_completes_the_handshake_gives_way(patient: httpx.URL, name: str) -> None:
    with half_connected(patient, name) as clients:
        wait_until(lambda: closed(clients) >= SOCKETS - MOST, "they do not give way")


@pytest.mark.parametrize("name", BEGINNINGS)
def test_who_never_completes_the_handshake_is_closed_in_time(roomy: httpx.URL, name: str) -> None:
    with half_connected(roomy, name) as clients:
        began = time.monotonic()
        wait_until(lambda: closed(clients) == SOCKETS, "they stay")
        assert time.monotonic() - began < 30, "it had a minute"


@pytest.mark.parametrize("size", [1, 100, 10**6])
def test_a_handshake_may_come_in_pieces_and_with_the_first_request(roomy: httpx.URL, size: int) -> None:
    """The request arrives with the handshake's last bytes."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl._create_unverified_context().wrap_bio(incoming, outgoing)
    body = b"a" * 300_000
    with socket.create_connection((roomy.host, roomy.port or 0), timeout=PATIENCE) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send() -> None:
            data = outgoing.read()
            pieces = [data[at : at + size] for at in range(0, len(data), size)] if len(data) < 10_000 else [data]
            for piece in pieces:
                client.sendall(piece)

        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                send()
                incoming.write(client.recv(65536))
        head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        left = head + body + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        while left:
            left = left[tls.write(left) :]  # a record at a time
        send()
        answer, ended = b"", False
        while not ended and (data := client.recv(65536)):
            incoming.write(data)
            try:
                while piece := tls.read(65536):
                    answer += piece
                ended = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                ended = True  # the server says that it has nothing more, and waits for the same of the client
        assert answer.count(b"HTTP/1.1 404 ") == 1 and answer.count(b"HTTP/1.1 200 ") == 1
