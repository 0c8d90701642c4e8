"""Clients that take their time: to send a header or a body, to read an answer; and those beside them, who notice nothing."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
from collections.abc import Iterator

import httpx
import psutil
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess, rest

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.open_connections import OpenConnections
from stage02_server.features.hardening.slow_clients import timed_protocol

COMPLETIONS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
SMALL_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", "--enable-server-load-tracking")
SECONDS = "0.4"
SLOW_STEPS = (
    "import stage02_server.features.echo_engine.echo_engine as e; e.EchoCoreClient.__init__.__defaults__ = (0.05,)"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """It waits for nobody."""
    limits = ("--request-header-timeout", "--request-body-timeout", "--response-stall-timeout")
    server = ServerProcess(*ECHO, *(word for limit in limits for word in (limit, SECONDS)))
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerProcess]:
    """It may open 128 files only: half of them may belong to clients that have not sent their request yet."""
    server = ServerProcess(*ECHO, patch=SMALL_LIMIT + "; " + SLOW_STEPS)
    server.wait_until_ready()
    yield server
    server.close()


def connect(server: ServerProcess, data: bytes, buffer: int | None = None) -> socket.socket:
    url = httpx.URL(server.url)
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(PATIENCE)
    client.connect((url.host, url.port))
    client.sendall(data)
    return client


BODY = b'{"prompt": "a", "max_tokens": 1}'
SLOW = {
    "nothing": (b"", b""),
    "line ends only": (b"\r\n", b"408"),
    "half a header": (b"GET /health HTTP/1.1\r\nHost", b"408"),
    "no body": (COMPLETIONS % 9, b"408"),
    "half a body": (COMPLETIONS % 9 + b"{", b"408"),
    "half a chunk": (COMPLETIONS.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked") + b"5\r\n{", b"408"),
    "half a header after an answer": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea", b"200"),
    "a body that was refused before it came": (COMPLETIONS % 10**9, b"413"),
}  # fmt: skip


def test_who_does_not_send_is_not_waited_for(server: ServerProcess) -> None:
    clients = {name: connect(server, data) for name, (data, _) in SLOW.items()}
    for name, client in clients.items():
        answer, status = rest(client), SLOW[name][1]
        assert answer.startswith(b"HTTP/1.1 " + status) if status else not answer, (name, answer)
        if status == b"408":
            error = json.loads(answer.rpartition(b"\r\n")[2])["error"]
            assert (error["code"], error["type"]) == (408, "BadRequestError") and "did not arrive" in error["message"]
            assert re.search(r"\(--request-(header|body)-timeout\)", error["message"])


def test_a_byte_now_and_then_does_not_help(server: ServerProcess) -> None:
    clients = [connect(server, b"GET /health HTTP/1.1\r\nA: "), connect(server, COMPLETIONS % 10_000)]
    for client in clients:
        client.settimeout(0.05)
        answer = b""
        while b" 408 " not in answer:
            with contextlib.suppress(TimeoutError):
                client.sendall(b"a")
                answer = client.recv(4096)


def test_who_sends_in_time_is_answered_and_may_come_again(patient: ServerProcess) -> None:
    client = connect(patient, b"")
    for _ in range(3):
        for piece in (b"\r\n", COMPLETIONS[:40], COMPLETIONS[40:] % len(BODY), BODY[:10], BODY[10:]):
            client.sendall(piece)
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200") and b'"text":"a"' in answer


def test_many_half_open_connections_do_not_keep_others_out(patient: ServerProcess) -> None:
    """More than the server may open files; the oldest of them make room."""
    server = patient
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == 128
    crowd = [connect(server, b"GET /health HTTP/1.1\r\nHost: ") for _ in range(60)]
    for _ in range(5):
        crowd += [connect(server, b"POST ") for _ in range(50)]
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a b", "max_tokens": 3}).status_code == 200
    assert crowd[0].recv(99).startswith(b"HTTP/1.1 408")
    for client in crowd:
        client.close()


def test_a_crowd_of_which_some_were_refused_harms_no_newcomer() -> None:
    """Who was refused may still be there, to read why; he is not refused again, in the middle of somebody else's arrival."""
    linger = "; import stage02_server.features.hardening.connection_limits as c; c.LINGER_SECONDS = 1000"
    server = ServerProcess(*ECHO, patch=SMALL_LIMIT + linger)
    server.wait_until_ready()
    with contextlib.closing(server), contextlib.ExitStack() as crowd:
        for _ in range(20):
            assert crowd.enter_context(connect(server, b"nonsense\r\n\r\n")).recv(12) == b"HTTP/1.1 400"
        for _ in range(60):
            crowd.enter_context(connect(server, b"GET /"))
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    assert not any("Traceback" in line for line in server.lines)


def load(server: ServerProcess) -> int:
    """Requests that the server is working on."""
    return int(httpx.get(f"{server.url}/load").json()["server_load"])


def worked_to_the_end(server: ServerProcess) -> float:
    """Requests whose every token the engine has computed."""
    counts = re.findall(
        r'request_success_total{.*finished_reason="length".*} (.*)', httpx.get(f"{server.url}/metrics").text
    )
    return sum(map(float, counts))


def test_who_does_not_read_is_let_go(server: ServerProcess) -> None:
    """A stream, and an answer in one piece; with a client that reads slowly beside them."""
    ask = {"prompt": "a", "max_tokens": 500, "logprobs": 20, "n": 24, "temperature": 1}
    deaf = []
    for more in ({"stream": True}, {}):
        body = json.dumps(ask | more).encode()
        deaf.append(connect(server, COMPLETIONS % len(body) + body, buffer=1024))
        assert deaf[-1].recv(12) == b"HTTP/1.1 200"
    process = psutil.Process(server.process.pid)
    wait_until(
        lambda: all(c.status != psutil.CONN_ESTABLISHED for c in process.net_connections("inet")),
        "the server still holds what nobody reads",
    )
    assert load(server) == 0


def test_a_request_behind_another_does_not_hide_that_the_client_left(patient: ServerProcess) -> None:
    """The answers would take 20 s; nobody hears them, and the engine ends them before."""
    server, clients, before = patient, [], worked_to_the_end(patient)
    for stream in (b"true", b"false"):
        body = b'{"prompt": "a b c", "max_tokens": 400, "ignore_eos": true, "stream": %s}' % stream
        clients.append(connect(server, COMPLETIONS % len(body) + body + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert clients[0].recv(12) == b"HTTP/1.1 200"
    while load(server) < 2:
        pass
    for client in clients:
        client.close()
    wait_until(lambda: load(server) == 0, "the engine works for nobody")
    assert worked_to_the_end(server) == before, "the engine worked for nobody"
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(("files", "room"), [(resource.RLIM_INFINITY, 4096), (128, 64), (65536, 4096)])
def test_room_for_requests_that_arrive_slowly(monkeypatch: pytest.MonkeyPatch, files: int, room: int) -> None:
    """A system without a limit on open files says -1, of which the half is no room at all."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert timed_protocol(FrontendArgs()).unfinished.max_connections == room


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    server = ServerProcess(*ECHO, "--max-connections", "3", "--timeout-keep-alive", "1000", patch=SLOW_STEPS)
    server.wait_until_ready()
    yield server
    server.close()


def test_one_connection_too_many_takes_the_place_of_the_longest_idle_one(narrow: ServerProcess) -> None:
    """And where each has work to do, it is refused; nobody loses what he waits for."""
    ask = b'{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    with contextlib.ExitStack() as stack:

        def client(data: bytes) -> socket.socket:
            return stack.enter_context(connect(narrow, data))

        get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        idle = [client(get) for _ in range(3)]
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in idle)
        idle[0].sendall(get)  # so it is not the longest idle one any more
        wait_until(lambda: idle[0].recv(65536).count(b"HTTP/1.1 200") or idle[0].recv(1), "no second answer")
        busy = client(COMPLETIONS % len(ask) + ask)
        assert busy.recv(12) == b"HTTP/1.1 200"
        assert rest(idle[1]).endswith(b"}")  # closed behind the end of its answer
        more = [client(COMPLETIONS % len(ask) + ask) for _ in range(2)]
        assert [each.recv(12) for each in more] == [b"HTTP/1.1 200"] * 2
        refused = rest(client(b""))
        assert b" 503 " in refused and b"--max-connections" in refused
        more[0].close()
        wait_until(lambda: b" 200 " in _asked(narrow, get), "its place is not free")


def test_where_all_places_are_taken_those_who_send_nothing_make_room(narrow: ServerProcess) -> None:
    with contextlib.ExitStack() as crowd:
        for data in 5 * (b"", b"GET / HT", COMPLETIONS % 9):
            crowd.enter_context(connect(narrow, data))
        assert httpx.get(f"{narrow.url}/version", timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize("then", [COMPLETIONS % 9, b""], ids=["and owes a body", "and is idle"])
def test_whoever_loses_a_place_and_does_not_read_is_gone(narrow: ServerProcess, then: bytes) -> None:
    """Nobody counts such a connection any more, so it may hold nothing either."""
    process, get = psutil.Process(narrow.process.pid), b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    assert httpx.get(f"{narrow.url}/openapi.json", timeout=PATIENCE).status_code == 200  # it is written once
    with contextlib.ExitStack() as deaf:
        for _ in range(8):  # 12 answers of 140 kB: as much as the system takes, and some more
            client = deaf.enter_context(connect(narrow, 12 * get + then, buffer=1024))
            with contextlib.suppress(ConnectionError):
                client.recv(12)  # the server has begun to answer, or has refused or cut it off
            wait_until(lambda: process.status() == psutil.STATUS_SLEEPING, "it never comes to rest")

        def held() -> int:
            return sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("inet"))

        wait_until(lambda: held() <= 3, "it holds more connections than it counts")
        assert httpx.get(f"{narrow.url}/version", timeout=PATIENCE).status_code in (200, 503)


def _asked(server: ServerProcess, data: bytes) -> bytes:
    with connect(server, b"") as client, contextlib.suppress(ConnectionError):
        client.sendall(data)
        return client.recv(65536)
    return b""


@given(
    most=st.integers(1, 4),
    life=st.lists(st.tuples(st.sampled_from(["add", "rest", "wake", "discard"]), st.integers(0, 7))),
)
def test_there_are_never_too_many(most: int, life: list[tuple[str, int]]) -> None:
    class Client:
        closed = False

        def end_idle(self) -> None:
            assert self not in opened.open and not self.closed
            self.closed = True

    opened, clients = OpenConnections(most), [Client() for _ in range(8)]
    for what, number in life:
        client, idle = clients[number], list(opened.idle)
        if what == "add" and client not in opened.open:
            client.closed = False
            full = len(opened.open) == most
            if not opened.add(client):
                assert full and not idle
                opened.discard(client)
            elif full:
                assert idle[0].closed  # type: ignore[attr-defined]
        elif what != "add":
            getattr(opened, what)(client)
        assert len(opened.open) <= most and set(opened.idle) <= opened.open
