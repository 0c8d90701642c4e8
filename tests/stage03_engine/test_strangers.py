"""Who reaches a port between machines and does not know the secret costs neither memory nor service, whatever he sends.

The last test starts a service of each form and tries every port on which one of its processes listens.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import resource
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from flood import flooded
from hypothesis import given, strategies as st
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stage03_engine.core.features.distributed.external_launcher import _warn_of_torchrun
from stage03_engine.core.features.distributed.parallel_state import _store
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.nodes import secure_sockets
from stage03_engine.nodes.door import MOST_CONNECTIONS, PIECE, Door
from stage03_engine.nodes.secure_sockets import Connection, Listener, NodeSecret

ROOT = Path(__file__).parents[2]
SECRET = b"a secret of these tests"
OURS = NodeSecret(SECRET)
MB = 1 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0, section Greeting
GIANT = b"\x02" + struct.pack(">Q", 8 << 30)  # a frame with a length of 8 bytes: 8 GiB
GIANT_COMMAND = b"\x06" + struct.pack(">Q", 8 << 30)
LINUX = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="packet filters are Linux's")

# Messages


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A listener's socket and one that is connected to it."""
    here, there = zmq.Context(), zmq.Context()
    listener = Listener(here, zmq.ROUTER, "tcp://127.0.0.1:0", OURS)
    connection = Connection(there, zmq.DEALER, listener.address, OURS, b"peer")
    connection.send(b"hello")
    assert listener.socket.recv_multipart() == [b"peer", b"hello"]
    yield listener.socket, connection.socket
    connection.close()
    listener.close()
    here.term()
    there.term()


SIZES = st.sampled_from([0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7])


@given(st.lists(SIZES, min_size=1, max_size=4))
def test_a_message_of_any_length_arrives_as_it_was(pair: tuple[zmq.Socket, zmq.Socket], sizes: list[int]) -> None:
    listener, connection = pair
    message = [os.urandom(size) for size in sizes]
    connection.send_multipart(message)
    assert listener.recv_multipart() == [b"peer", *message]
    listener.send_multipart([b"peer", *message])
    assert connection.recv_multipart() == message


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [b"\x91\x03", b"a"], [b"\x92\x00\x01", b"a"], [b"\x90"], [b"x", b"y"]]
)
def test_what_fits_no_message_is_no_end(pair: tuple[zmq.Socket, zmq.Socket], frames: list[bytes]) -> None:
    """It is passed on for whoever decodes it to refuse, with one frame at least."""
    listener, connection = pair
    zmq.Socket.send_multipart(connection, frames)
    name, *rest = listener.recv_multipart()
    assert name == b"peer" and rest == frames


# Strangers


def send_until_cut(address: tuple[str, int], first: bytes, most: int = 64 * MB) -> int:
    """How many bytes the other side takes before it ends the connection; `most` if it does not."""
    taken = 0
    with socket.create_connection(address, PATIENCE) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(first)
        while taken < most:
            stranger.sendall(bytes(1 << 16))
            taken += 1 << 16
    return taken


def place_of(listener: Listener) -> tuple[str, int]:
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("frame", [GIANT, GIANT_COMMAND], ids=["message", "command"])
def test_an_announced_giant_is_cut_off(frame: bytes) -> None:
    with zmq.Context() as context, closing(Listener(context, zmq.ROUTER, "tcp://127.0.0.1:0", OURS)) as listener:
        assert send_until_cut(place_of(listener), GREETING + frame) < 32 * MB  # what the system's buffers hold


@LINUX
def test_too_many_connections_close_the_door_until_some_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is inside notices nothing."""
    monkeypatch.setattr(secure_sockets, "Door", partial(Door, most=8))
    monkeypatch.setattr(secure_sockets, "SILENCE_MS", 60_000)  # nobody is sent away meanwhile
    with zmq.Context() as context, zmq.Context() as there, ExitStack() as strangers:
        listener = Listener(context, zmq.ROUTER, "tcp://127.0.0.1:0", OURS)
        first = Connection(there, zmq.DEALER, listener.address, OURS, b"first")
        first.send(b"hello")
        assert listener.socket.recv_multipart() == [b"first", b"hello"]
        door, came = listener._door, 0
        while not door.is_closed:
            with contextlib.suppress(TimeoutError):  # the door closes just now
                strangers.enter_context(socket.create_connection(place_of(listener), 0.2))
                came += 1
        assert came >= 7 and len(door._open) >= 8
        with pytest.raises(TimeoutError):
            socket.create_connection(place_of(listener), 0.2)
        first.send(b"still here")
        assert listener.socket.recv_multipart() == [b"first", b"still here"]
        strangers.close()
        wait_until(lambda: not door.is_closed, "the door stays closed")
        second = Connection(there, zmq.DEALER, listener.address, OURS, b"second")
        second.send(b"hello")
        assert listener.socket.recv_multipart() == [b"second", b"hello"]
        for each in (first, second, listener):
            each.close()


@LINUX
@pytest.mark.parametrize("secret", [OURS, None], ids=["with a secret", "without"])
def test_who_has_the_secret_gets_in_among_those_who_say_nothing(
    monkeypatch: pytest.MonkeyPatch, secret: NodeSecret | None
) -> None:
    """As many as there is room for hold their places, and come again as soon as they lose them."""
    monkeypatch.setattr(secure_sockets, "Door", partial(Door, most=8))
    monkeypatch.setattr(secure_sockets, "SILENCE_MS", 600_000)
    with zmq.Context() as context, zmq.Context() as there, ExitStack() as stack:
        listener = stack.enter_context(closing(Listener(context, zmq.ROUTER, "tcp://127.0.0.1:0", secret)))
        inside = [Connection(there, zmq.DEALER, listener.address, secret, b"%d" % number) for number in range(2)]
        for connection in inside:
            stack.callback(connection.close)
            connection.send(b"hello")
            listener.socket.recv_multipart()
        silent = HALF_GREETINGS[:3] if secret else HALF_GREETINGS[:2]  # of those without one a greeting is enough
        strangers = stack.enter_context(flooded(place_of(listener), silent, many=40))
        wait_until(lambda: listener._door.is_closed, "the door stays open")
        late = Connection(there, zmq.DEALER, listener.address, secret, b"late")
        stack.callback(late.close)
        late.send(b"hello")
        assert listener.socket.poll(int(PATIENCE * 1000)), "it does not get in"
        assert listener.socket.recv_multipart() == [b"late", b"hello"]
        seen = strangers.inside
        wait_until(lambda: strangers.inside > seen + 40, "nobody makes room any longer")
        for connection in (*inside, late):
            connection.news()  # none of them was cut
            connection.send(b"still here")
            assert listener.socket.recv_multipart()[1] == b"still here"


def test_where_workers_meet_is_the_given_address_alone() -> None:
    """torch's own store would listen on all addresses."""
    limit, port = {"timeout": timedelta(seconds=PATIENCE)}, free_port()
    address = f"tcp://127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_store, Ranks(1, 2, 1), address, limit)
        store = _store(Ranks(0, 2, 1), address, limit)
        store.set("a", "b")
        assert other.result().get("a") == b"b"
    found = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert [ip for ip, number in found if number == port] == ["127.0.0.1"]


def test_torchrun_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Once on each machine; not where a user has started the processes himself."""
    for environ in (
        {},
        {"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "1"},
        {"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "0"},
    ):
        _warn_of_torchrun(environ)
    [record] = caplog.records
    assert record.message.startswith("torchrun listens unprotected on all addresses of this machine")


# Who listens at all

LISTENS = {
    "stage01_cli/tools/lab/command.py": "JupyterLab, on 127.0.0.1",
    "stage02_server/api_server.py": "HTTP",
    "stage02_server/features/hardening/unix_socket.py": "HTTP, on a file",
    "stage03_engine/frontend/core_client.py": "files in a private folder",
    "stage03_engine/frontend/engine_process.py": "files in a private folder",
    "stage03_engine/frontend/features/data_parallel/coordinator.py": "files in a private folder",
    "stage03_engine/core/features/distributed/machines/head.py": "only to see whether a port is free",
    "stage03_engine/core/features/distributed/parallel_state.py": "other machines, until the workers have met",
    "stage03_engine/nodes/secure_sockets.py": "other machines",
    "stage03_engine/nodes/door.py": "inside the process",
}
"""File -> who reaches what it listens on."""


def test_one_place_makes_the_sockets_that_other_machines_reach() -> None:
    """Whoever listens in a new place has to say here who reaches it."""
    found = set()
    for file in (file for stage in ROOT.glob("stage0*") for file in stage.rglob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
        if names & {"bind", "bind_to_random_port", "create_server", "listen", "start_server", "start_unix_server"}:
            found.add(str(file.relative_to(ROOT)))
    assert found == LISTENS.keys()


# Services

HTTP = ("APIServer", "--port", "open")
GLOO = ("Worker", "any", "shut")
DP, TP = "-dp=2 -dpl=1 -dpa=127.0.0.1 -dpp={port}", "-tp=2 --nnodes=2 --master-port={port}"
FORMS: dict[str, tuple[str, str, set[tuple[str, str, str]]]] = {
    "plain": ("", "", {HTTP}),
    "asc": ("-asc=2", "", {HTTP}),
    "dp": ("-dp=2", "", {HTTP}),
    "dp and asc": ("-dp=2 -asc=2", "", {HTTP}),
    "disaggregation": ("--disaggregate=1:1", "", {HTTP, ("EngineCore", "any", "open")}),
    "tp": ("-tp=2", "", {HTTP, GLOO}),
    "pp": ("-pp=2", "", {HTTP, GLOO}),
    "dp over machines": (DP, f"{DP} --headless -dpr=1", {HTTP, ("APIServer", "--data-parallel-rpc-port", "open")}),
    "tp over machines": (
        TP,
        f"{TP} --headless --node-rank=1",
        {HTTP, GLOO, ("EngineCore", "--master-port + 1", "open"), ("EngineCore", "any", "open"), ("Worker", "--master-port", "shut")},
    ),
}  # fmt: skip
"""Flags of the server, those of a second machine, and which ports there are then: whose, which, and can anybody connect?"""
LONG = {"dp", "asc", "dp and asc", "pp"}
SMALL = ["--kv-cache-memory-bytes=50000000", "--num-threads=1"]
MANY = 2000
HALF_GREETINGS = [
    b"",
    GREETING[:11],
    GREETING,
    GREETING + GIANT,
    GREETING + GIANT_COMMAND,
    os.urandom(4096),
    b"\xff" * 10,
]
HALF_REQUESTS = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8589934592\r\n\r\n[1,",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
    os.urandom(4096),
    GREETING,
]


@contextmanager
def service(form: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[ServerProcess], int]]:
    """The servers of one form, the one with the API first, and the port that their flags name. A second machine joins while strangers flood
    the port at which it is expected."""
    monkeypatch.setenv("STAGES_NODE_SECRET", SECRET.decode())
    port, common = free_port(), ["gpt2-tiny", *SMALL]
    flags, other = (some.format(port=port).split() for some in FORMS[form][:2])
    with ExitStack() as stack:
        servers = [ServerProcess(*common, "--host=127.0.0.1", "--port=0", *flags)]
        stack.callback(servers[0].close)
        if other:
            host, number = servers[0].wait_for(r"Listening on (?:tcp://)?([\d.]+):(\d+) for").groups()
            with flooded((host, int(number)), HALF_GREETINGS, MANY) as strangers:
                wait_until(lambda: strangers.inside > MOST_CONNECTIONS, "nobody comes")
                servers.append(ServerProcess(*common, *other))
                stack.callback(lambda: servers[1].close())
                servers[1].wait_for("Joined the head")
        servers[0].wait_until_ready()
        yield servers, port


@LINUX
@pytest.mark.long
def test_a_machine_comes_and_goes_in_a_flood(monkeypatch: pytest.MonkeyPatch, many_files: None) -> None:
    """It gets in each time, requests are answered with it and without it, and the head grows no more than at first."""
    with service("dp over machines", monkeypatch) as (servers, port):
        head, node = servers
        expected, process = answer(head.url), psutil.Process(head.process.pid)
        before = process.memory_info().rss
        with flooded(("127.0.0.1", port), HALF_GREETINGS, many=5000, again=0.3) as strangers:
            for _ in range(8):
                node.close()
                head.wait_for("is lost")
                assert answer(head.url) == expected
                node = ServerProcess("gpt2-tiny", *SMALL, *FORMS["dp over machines"][1].format(port=port).split())
                servers[1:] = [node]
                head.wait_for("has joined")
                wait_until(lambda: not httpx.get(f"{head.url}/health").content, "its engine does not come back")
                assert [answer(head.url) for _ in range(4)] == [expected] * 4
                assert process.memory_info().rss < before + 64 * MB
        print(f"{strangers.inside} strangers got in")


def free_port() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second, contextlib.suppress(OSError):
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            return int(first.getsockname()[1])


def processes_of(servers: list[ServerProcess]) -> list[psutil.Process]:
    roots = [psutil.Process(server.process.pid) for server in servers]
    return [each for root in roots for each in (root, *root.children(recursive=True))]


def listeners_of(servers: list[ServerProcess]) -> set[tuple[str, str, int]]:
    """Whose, at which address, and which port."""
    found = set()
    for process in processes_of(servers):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = re.match(r"stages::([A-Za-z]+)", process.cmdline()[0])
            for each in process.net_connections("inet"):
                assert each.type == socket.SOCK_STREAM, "who has a datagram socket?"
                if each.status == psutil.CONN_LISTEN:
                    found.add((name[1] if name else "APIServer", *each.laddr))
    return found


def is_open(place: tuple[str, int]) -> bool:
    """The system answers for a process that is busy; it says nothing where a filter drops what comes."""
    try:
        socket.create_connection(place, 1.0).close()
    except TimeoutError:
        return False
    return True


def state_of(servers: list[ServerProcess]) -> dict[psutil.Process, tuple[int, int]]:
    """Memory and descriptors of each process that lasts."""
    found = {}
    for each in processes_of(servers):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[each] = (each.memory_info().rss, each.num_fds())
    return found


def crowd(place: tuple[str, int], beginnings: list[bytes]) -> list[socket.socket]:
    """So many connections at once as nobody makes; those that the system lets wait keep trying. Half of them send the first byte only."""
    strangers = []
    for number in range(MANY):
        strangers.append(stranger := socket.socket())
        stranger.setblocking(False)
        stranger.bind((f"127.0.{1 + number % 3}.{2 + number % 200}", 0))
        stranger.connect_ex(place)
    for number, stranger in enumerate(strangers):
        start = beginnings[number % len(beginnings)]
        with contextlib.suppress(OSError):
            stranger.send(start if number // len(beginnings) % 2 else start[:1])
    return strangers


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def answer(url: str, client: httpx.Client | None = None) -> str:
    body = {"prompt": "To be", "max_tokens": 8, "temperature": 0}
    got = (client or httpx).post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


def rows_of_the_page() -> set[tuple[str, str]]:
    """Process and port of each row in the table of ports."""
    page = (ROOT / "stage02_server/features/hardening/LIMITS.md").read_text()
    [table] = [part for part in page.split("\n## ") if part.startswith("Ports\n")]
    return {tuple(re.findall(r"`([^`]+)`", line)[:2]) for line in table.splitlines() if line.startswith("| `")}  # type: ignore[misc]


def test_the_page_has_a_row_for_each_port() -> None:
    ours = {port[:2] for _, _, ports in FORMS.values() for port in ports}
    assert rows_of_the_page() == ours | {
        ("Router", "--port"),
        ("LLM", "MASTER_PORT"),
        ("torchrun", "any"),
        ("Ray", "any"),
        ("lab", "any"),
    }


@pytest.mark.slow(keep=("plain", "dp over"))
@LINUX
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.long] if form in LONG else []) for form in FORMS]
)
def test_strangers_at_every_port(form: str, monkeypatch: pytest.MonkeyPatch, many_files: None) -> None:
    """Every port is one of the table, on one address, and 2,000 strangers at each of them cost little: garbage, giant frames, half
    handshakes and half requests, while others are answered."""
    with service(form, monkeypatch) as (servers, port), httpx.Client() as client:
        url = servers[0].url
        names = {int(url.rpartition(":")[2]): "--port", port: "--master-port", port + 1: "--master-port + 1"}
        if "-dpp" in FORMS[form][0]:
            names[port] = "--data-parallel-rpc-port"
        expected, found = answer(url, client), listeners_of(servers)
        assert {ip for _, ip, _ in found} == {"127.0.0.1"}
        states = {place: "open" if is_open(place) else "shut" for place in {each[1:] for each in found}}
        known = {(who, names.get(number, "any"), states[ip, number]) for who, ip, number in found}
        assert known == FORMS[form][2]
        before = state_of(servers)
        for place, state in states.items():
            if state == "open":
                strangers = crowd(place, HALF_REQUESTS if names.get(place[1]) == "--port" else HALF_GREETINGS)
                assert answer(url) == answer(url, client) == expected, place
                during = state_of(servers)
                assert all(during[each][0] < memory + 64 * MB for each, (memory, _) in before.items()), place
                for stranger in strangers:
                    stranger.close()
                wait_until(
                    lambda: all(
                        now[1] <= before[each][1] + 2 for each, now in state_of(servers).items() if each in before
                    ),
                    f"descriptors remain open after strangers at {place}",
                )
                assert answer(url) == answer(url, client) == expected, place
        for server in servers:
            assert server.process.poll() is None and not any("Traceback" in line for line in server.lines)
