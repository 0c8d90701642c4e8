"""Sockets between machines: who gets a connection, and what is seen of it on the way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from patience import PATIENCE, wait_until

from stage03_engine.core.features.distributed.machines.links import RouterToExecutor, WorkerRouter
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.nodes.manifest import NodeConfig
from stage03_engine.nodes.secure_sockets import (
    CUTS,
    VARIABLE,
    Connection,
    KeyPair,
    Listener,
    Lost,
    NodeSecret,
    Refused,
    read_secret,
)

OURS, OTHER = NodeSecret(b"0123456789abcdef"), NodeSecret(b"0123456789abcdeg")


class Ends:
    """A listener, and connections to it."""

    def __init__(self, secret: NodeSecret | None) -> None:
        self.here, self.there = zmq.Context(), zmq.Context()
        self.listener = Listener(self.here, zmq.ROUTER, "tcp://127.0.0.1:0", secret)

    def connect(self, secret: NodeSecret | None, address: str | None = None) -> Connection:
        self.connection = Connection(self.there, zmq.DEALER, address or self.listener.address, secret)
        return self.connection

    def close(self) -> None:
        self.connection.close()
        self.listener.close()
        self.listener.close()
        self.here.term()
        self.there.term()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends(OURS)) as made:
        yield made


def outcome(connection: Connection) -> None:
    """Wait until something becomes of it."""
    before = connection.is_there
    while connection.is_there is before:
        assert connection.monitor.poll(int(PATIENCE * 1000))
        connection.news()


def test_who_has_the_secret_is_heard_and_hears(ends: Ends) -> None:
    connection = ends.connect(NodeSecret(b"0123456789abcdef"))
    connection.send(b"hello")
    peer, said = ends.listener.socket.recv_multipart()
    ends.listener.socket.send_multipart([peer, said + b" you"])
    assert connection.socket.recv_multipart() == [b"hello you"] and ends.listener.refused() == 0
    outcome(connection)
    assert connection.is_there
    ends.listener.close()
    with pytest.raises(Lost):
        outcome(connection)


def impostor() -> NodeSecret:
    """Knows the listener's key, and not that of those who connect."""
    made = NodeSecret(b"0123456789abcdef")
    made.connects = KeyPair(*zmq.curve_keypair())
    return made


@pytest.mark.parametrize("secret", [OTHER, None, impostor()])
def test_anybody_else_is_refused_and_both_sides_know(ends: Ends, secret: NodeSecret | None) -> None:
    connection = ends.connect(secret)
    connection.send(b"hello")
    with pytest.raises(Refused):
        outcome(connection)
    assert ends.listener.monitor.poll(int(PATIENCE * 1000)) and ends.listener.refused()
    assert not ends.listener.socket.poll(0) and not connection.is_there


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0, section Greeting


def test_a_message_after_the_refusal_waits_for_nothing() -> None:
    """Who notices by itself that the other side wants a secret tries no more, and nothing could ever be sent."""
    with socket.create_server(("127.0.0.1", 0)) as server, zmq.Context() as context:
        connection = Connection(context, zmq.DEALER, f"tcp://127.0.0.1:{server.getsockname()[1]}", None)
        with server.accept()[0] as accepted, closing(connection):
            accepted.sendall(GREETING)
            with pytest.raises(Refused):
                outcome(connection)
            wait_until(lambda: not connection.socket.poll(0, zmq.POLLOUT), "it can be sent still")
            connection.send(b"hello")


@pytest.mark.parametrize("cuts", [CUTS - 1, CUTS])
def test_a_handshake_that_is_cut_is_tried_again(ends: Ends, cuts: int) -> None:
    """The head may be busy, or make room for others; where it always ends so, the secrets differ."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        place = busy.getsockname()
        connection = ends.connect(OURS, f"tcp://127.0.0.1:{place[1]}")
        for _ in range(cuts):
            busy.accept()[0].close()
        if cuts == CUTS:
            with pytest.raises(Refused):
                outcome(connection)
            return
        near = busy.accept()[0]
        far = socket.create_connection(("127.0.0.1", int(ends.listener.address.rpartition(":")[2])))
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(source, target, []), daemon=True).start()
        outcome(connection)
        for sock in (near, far):
            sock.close()


def test_without_its_gatekeeper_a_listener_admits_nobody(ends: Ends) -> None:
    assert ends.listener._gatekeeper is not None
    ends.listener._gatekeeper.stop()
    connection = ends.connect(OURS)
    connection.send(b"hello")
    with pytest.raises(Refused):
        outcome(connection)
    assert not ends.listener.socket.poll(0) and not connection.is_there


def test_a_secret_on_one_side_alone_is_no_connection() -> None:
    with closing(Ends(None)) as ends, pytest.raises(Refused):
        outcome(ends.connect(OURS))


def test_without_a_secret_by_name_anybody_is_heard() -> None:
    with closing(Ends(None)) as ends:
        ends.connect(None).send(b"hello")
        assert ends.listener.socket.recv_multipart()[1] == b"hello"


def test_nothing_that_is_said_can_be_read_on_the_way(ends: Ends) -> None:
    """A relay in the middle keeps all bytes: neither the message nor the secret is among them."""
    seen: list[bytes] = []
    port = int(ends.listener.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = ends.connect(OURS, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        connection.send(b"to be or not to be")
        near = server.accept()[0]
        far = socket.create_connection(("127.0.0.1", port))
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(source, target, seen), daemon=True).start()
        assert ends.listener.socket.recv_multipart()[1] == b"to be or not to be"
        for sock in (near, far):
            sock.close()
    said = b"".join(seen)
    assert b"CURVE" in said and b"to be" not in said and b"0123456789" not in said


def pump(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
    try:
        while data := source.recv(4096):
            seen.append(data)
            target.sendall(data)
    except OSError:
        return


def test_bytes_that_are_no_zmq_are_no_message(ends: Ends) -> None:
    ends.connect(OURS)
    port = int(ends.listener.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(os.urandom(512))
    outcome(ends.connection)
    assert not ends.listener.socket.poll(0)


def test_strangers_who_try_again_and_again_do_not_stop_the_workers() -> None:
    """Nobody counts those that a WorkerRouter refuses."""
    there = zmq.Context()
    without_secret = b"\xff".ljust(9, b"\0") + b"\x7f\x03\0" + b"NULL".ljust(52, b"\0")  # how ZMQ begins
    with closing(WorkerRouter("tcp://127.0.0.1:*", OURS, 2)) as router:
        worker = Connection(there, zmq.DEALER, router.address, OURS, b"worker1")
        port = int(router.address.rpartition(":")[2])
        for _ in range(2100):
            with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(ConnectionError):
                stranger.settimeout(PATIENCE)
                stranger.sendall(without_secret)
                while stranger.recv(4096):
                    pass
        worker.socket.send_multipart([b"kind", b"payload", b"cause"])
        assert router.receive(int(PATIENCE * 1000)) == (1, (b"kind", b"payload", b"cause"))
        worker.close()
    there.term()


@pytest.mark.parametrize("secret", [OURS, None])
def test_what_no_worker_would_say_does_not_end_the_engine(secret: NodeSecret | None) -> None:
    """Without a secret anybody may say it."""
    there, message = zmq.Context(), (b"kind", b"payload", b"cause")
    with closing(WorkerRouter("tcp://127.0.0.1:*", secret, 2)) as router:
        for name in (b"", b"worker", b"worker2", b"worker-1", b"worker1 ", b"\xff"):
            stranger = Connection(there, zmq.DEALER, router.address, secret, name)
            stranger.socket.send_multipart(message)
            assert stranger.socket.getsockopt(zmq.IDENTITY) == name
            assert router.receive(int(PATIENCE * 1000)) is None, name
            stranger.close()
        worker = Connection(there, zmq.DEALER, router.address, secret, b"worker1")
        for frames in ([b""], [b"kind", b"payload"], [*message, b"more"]):
            worker.socket.send_multipart(frames)
            assert router.receive(int(PATIENCE * 1000)) is None, frames
        worker.socket.send_multipart(message)
        assert router.receive(int(PATIENCE * 1000)) == (1, message)
        worker.close()
    there.term()


def test_a_worker_notices_that_its_connection_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    with (
        closing(WorkerRouter("tcp://127.0.0.1:*", OURS, 2)) as router,
        closing(RouterToExecutor(router.address, 1)) as worker,
    ):
        worker.send(b"kind", b"hello")
        assert router.receive(int(PATIENCE * 1000)) == (1, (b"kind", b"hello", b""))
        router.send(1, (b"kind", b"payload", b"cause"))
        assert worker.receive() == (b"kind", b"payload", b"cause")
        router.close()
        with pytest.raises(StagesError, match="its connection to the engine is lost"):
            worker.receive()


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "[::1]"])
def test_hosts_may_have_names_and_other_kinds_of_numbers(host: str) -> None:
    context, there = zmq.Context(), zmq.Context()
    try:
        listener = Listener(context, zmq.ROUTER, f"tcp://{host}:0", OURS)
    except StagesError:
        pytest.skip("this machine has no IPv6")
    connection = Connection(there, zmq.DEALER, listener.address.replace("0.0.0.0", "127.0.0.1"), OURS)
    connection.send(b"hello")
    assert listener.socket.recv_multipart()[1] == b"hello"
    connection.close()
    listener.close()
    context.term()
    there.term()


def test_addresses_that_cannot_be(ends: Ends) -> None:
    ends.connect(OURS)
    where = ends.listener.address.removeprefix("tcp://")
    for address, message in (
        (f"tcp://{where}", f"{where} is taken; choose another port"),
        ("tcp://192.0.2.1:5", "this machine has no address 192.0.2.1:5"),
        ("tcp://nowhere.invalid:5", "this machine has no address nowhere.invalid:5"),
    ):
        context = zmq.Context()
        with pytest.raises(StagesError, match=message):
            Listener(context, zmq.ROUTER, address, OURS)
        context.term()
    context = zmq.Context()
    with pytest.raises(StagesError, match="is not an address"):
        Connection(context, zmq.DEALER, "tcp://127.0.0.1:no", OURS)
    context.term()


def test_a_secret_that_every_user_can_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    config = NodeConfig(str(tmp_path / "secret"))
    for mode, warn, lines in ((0o644, True, 1), (0o644, False, 0), (0o640, True, 0), (0o600, True, 0)):
        (tmp_path / "secret").chmod(mode)
        caplog.clear()
        read_secret(config, warn)
        assert len(caplog.messages) == lines
        assert all(line.startswith("Every user of this machine can read") for line in caplog.messages)


def test_where_the_secret_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, " 0123456789abcdef\n")
    (tmp_path / "secret").write_text("another secret of some length\n")
    (tmp_path / "short").write_text("too short\n")
    (tmp_path / "empty").write_text("\n")
    config = NodeConfig()
    from_variable = read_secret(config)
    assert from_variable is not None and from_variable.listens == OURS.listens
    assert OURS.listens != OURS.connects and OURS.listens != OTHER.listens
    from_file = read_secret(replace(config, node_secret_file=str(tmp_path / "secret")))
    assert from_file is not None and from_file.listens != from_variable.listens
    assert read_secret(replace(config, node_secret_required=False)) is None
    for name, message in (
        ("short", "the shared secret has 9 bytes and needs at least 16: make one with"),
        ("empty", "is empty: make one with"),
        ("absent", "cannot be read: No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_secret(replace(config, node_secret_file=str(tmp_path / name)))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match="need a shared secret: make one with"):
        read_secret(config)
    assert "0123456789abcdef" not in repr(OURS) and OURS.listens.secret.decode() not in repr(OURS)
    assert OURS.listens.secret.decode() not in repr(OURS.listens)
