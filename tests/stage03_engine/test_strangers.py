"""Who reaches a port between machines and does not know the secret costs neither memory nor service, whatever he sends.

The last test starts a service of each form and tries every port on which one of its processes listens.
"""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from hypothesis import given, settings, strategies as st
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stage03_engine.nodes import secure_sockets
from stage03_engine.nodes.door import PIECE, Door
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
@settings(max_examples=25)
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


# Who listens at all

LISTENS = {
    "stage01_cli/tools/lab/command.py": "JupyterLab, on 127.0.0.1",
    "stage02_server/api_server.py": "HTTP",
    "stage02_server/features/hardening/unix_socket.py": "HTTP, on a file",
    "stage03_engine/frontend/core_client.py": "files in a private folder",
    "stage03_engine/frontend/engine_process.py": "files in a private folder",
    "stage03_engine/frontend/features/data_parallel/coordinator.py": "files in a private folder",
    "stage03_engine/core/features/distributed/machines/head.py": "only to see whether a port is free",
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


def ports_of(server: psutil.Process) -> set[tuple[str, int]]:
    """Where the server and its children listen."""
    found = set()
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return {("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port) for ip, port in found}


def memory_of(server: psutil.Process) -> int:
    total = 0
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def free_port() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second, contextlib.suppress(OSError):
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            return int(first.getsockname()[1])


FORMS: dict[str, tuple[list[str], list[str]]] = {
    "plain": ([], []),
    "dp": (["-dp=2"], []),
    "asc": (["-dp=2", "-asc=2"], []),
    "dp over machines": (["-dp=2", "-dpl=1", "-dpa=127.0.0.1", "-dpp={port}"], ["--headless", "-dp=2", "-dpr=1", "-dpl=1", "-dpa=127.0.0.1", "-dpp={port}"]),
    "tp over machines": (["-tp=2", "--nnodes=2", "--master-port={port}"], ["--headless", "-tp=2", "--nnodes=2", "--node-rank=1", "--master-port={port}"]),
}  # fmt: skip
"""Flags of the server, and of a second machine."""


@contextmanager
def service(form: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServerProcess, str]]:
    monkeypatch.setenv("STAGES_NODE_SECRET", SECRET.decode())
    port = free_port()
    common = ["gpt2-tiny", "--kv-cache-memory-bytes=50000000", "--num-threads=1"]
    flags, other = ([each.format(port=port) for each in some] for some in FORMS[form])
    with ExitStack() as stack:
        server = ServerProcess(*common, "--host=127.0.0.1", "--port=0", *flags)
        stack.callback(server.close)
        if other:
            stack.callback(ServerProcess(*common, *other).close)
        yield server, server.wait_until_ready()


@LINUX
@pytest.mark.parametrize("form", FORMS)
def test_strangers_at_every_port(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, giant frames, half handshakes, and 500 connections at once."""
    with service(form, monkeypatch) as (server, url):
        process = psutil.Process(server.process.pid)

        def answer() -> str:
            body = {"prompt": "To be", "max_tokens": 8, "temperature": 0}
            got = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
            assert got.status_code == 200
            return str(got.json()["choices"][0]["text"])

        expected, ports, before = answer(), ports_of(process), memory_of(process)
        inner = {place for place in ports if f":{place[1]}" not in url}
        assert bool(inner) == bool(FORMS[form][1]), "ports that nobody knows of"
        for place in inner:
            with ExitStack() as strangers, contextlib.suppress(TimeoutError):  # some ports drop whatever comes
                for start in (
                    b"",
                    os.urandom(4096),
                    GREETING,
                    GREETING + GIANT,
                    GREETING + GIANT_COMMAND,
                    b"\xff" * 10,
                ):
                    stranger = strangers.enter_context(socket.create_connection(place, 0.5))
                    stranger.settimeout(0.5)
                    with contextlib.suppress(OSError):
                        stranger.sendall(start + bytes(32 * MB))
                for number in range(500):
                    stranger = strangers.enter_context(socket.create_connection(place, 0.5))
                    with contextlib.suppress(OSError):
                        stranger.sendall(GREETING[: number % 65])
                assert answer() == expected
            assert answer() == expected
        assert memory_of(process) < before + 64 * MB
        assert server.process.poll() is None and not any("Traceback" in line for line in server.lines)
