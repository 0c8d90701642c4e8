"""Sockets between machines: what they carry is encrypted, and only those who know the shared secret get a connection.

CurveZMQ does it, with two key pairs that are derived from the secret: one for the side that listens, one for the side that connects. So
only the secret has to be handed out. scrypt makes each guess at a weak secret cost some 50 ms.

    secret = read_secret(config.node_config)
    listener = Listener(context, zmq.ROUTER, "tcp://10.0.0.1:13345", secret)  # listener.socket, listener.refused()
    connection = Connection(context, zmq.DEALER, "tcp://10.0.0.1:13345", secret)  # connection.socket, connection.news()

vLLM's sockets between machines are open to anyone who reaches them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.nodes.door import FAILED, MAX_FRAME, Door, SocketOfPieces
from stage03_engine.nodes.manifest import NodeConfig

logger = logging.getLogger(__name__)
VARIABLE = "STAGES_NODE_SECRET"
MIN_BYTES = 16
HOW_TO = (
    "make one with `openssl rand -hex 32 > node-secret`, copy it to every machine, and name it with --node-secret-file or put it into "
    f"the variable {VARIABLE}; --no-node-secret-required does without"
)
CONNECT_MS = 1000
"""For one attempt to connect: the system itself would try again more and more seldom."""
HEARTBEAT_MS = 1000
SILENCE_MS = 5000
"""A connection that has been silent for so long is closed: the other machine, or the network, is gone."""
CUTS = 3
"""A handshake that ends without a word may have met a head that is busy, or full of strangers: so often it is tried."""
WARN_SECONDS = 10.0
"""From one warning of nodes without the secret to the next: repeated attempts must not fill the log."""
_KEY_BYTES = 32
_DOMAIN = "nodes"


@dataclass(frozen=True, repr=False)
class KeyPair:
    """One side's CURVE keys, in Z85. `repr` shows neither: the listener's public key is as good as secret, too."""

    public: bytes
    secret: bytes


class NodeSecret:
    """The keys that are derived from the secret. `repr` shows nothing of it."""

    def __init__(self, text: bytes) -> None:
        keys = hashlib.scrypt(text, salt=b"vllm in stages: nodes", n=1 << 14, r=8, p=1, dklen=2 * _KEY_BYTES)
        self.listens, self.connects = (_key_pair(keys[:_KEY_BYTES]), _key_pair(keys[_KEY_BYTES:]))


def _key_pair(key: bytes) -> KeyPair:
    secret = z85.encode(key)
    return KeyPair(zmq.curve_public(secret), secret)


def read_secret(config: NodeConfig, warn: bool = True) -> NodeSecret | None:
    """The secret in the file that is named, or else in the variable STAGES_NODE_SECRET; None if none is required.

    Spaces and line ends around it do not count. `warn` of a file that every user can read. Raises ConfigError if there is none, or if it is too short.
    """
    if not config.node_secret_required:
        return None
    file = config.node_secret_file
    given = _read_file(file, warn) if file is not None else os.fsencode(os.environ.get(VARIABLE, "")).strip()
    if not given:
        raise ConfigError(f"machines that speak with each other need a shared secret: {HOW_TO}")
    if len(given) < MIN_BYTES:
        raise ConfigError(f"the shared secret has {len(given)} bytes and needs at least {MIN_BYTES}: {HOW_TO}")
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq cannot encrypt (it was built without CURVE); install one from a wheel")
    return NodeSecret(given)


def _read_file(file: str, warn: bool) -> bytes:
    try:
        with Path(file).expanduser().open("rb") as opened:
            given, mode = opened.read().strip(), os.fstat(opened.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"node_secret_file {file!r} cannot be read: {error.strerror}") from None
    if not given:
        raise ConfigError(f"node_secret_file {file!r} is empty: {HOW_TO}")
    if warn and mode & stat.S_IROTH:
        logger.warning("Every user of this machine can read node_secret_file %r; `chmod 600` keeps it to you.", file)
    return given


class _OnlyNodes:
    """For the authenticator: which client keys may connect."""

    def __init__(self, secret: NodeSecret) -> None:
        self._admitted = secret.connects.public

    def callback(self, domain: str, key: bytes) -> bool:
        """May a peer with this public key (Z85) connect?"""
        return key == self._admitted


def _prepare(socket: zmq.Socket, address: str) -> None:
    socket.set_hwm(0)  # never drop, never block: the schedulers' queues are the only queues that may grow
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)


class Listener:
    """A bound socket, and the only way to get one that other machines reach. `context` is this listener's own: its gatekeeper decides for all sockets of the context."""

    def __init__(self, context: zmq.Context, kind: int, address: str, secret: NodeSecret | None) -> None:
        """Raises StagesError if the address cannot be listened on."""
        self.socket = context.socket(kind, SocketOfPieces)
        _prepare(self.socket, address)
        self._gatekeeper: ThreadAuthenticator | None = None
        if secret is not None:
            self._gatekeeper = ThreadAuthenticator(context)
            self._gatekeeper.start()
            self._gatekeeper.configure_curve_callback(_DOMAIN, _OnlyNodes(secret))
            self.socket.zap_domain = _DOMAIN.encode()
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gatekeeper ZMQ would admit everybody
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = secret.listens.public, secret.listens.secret
        self._door = Door(self.socket)
        self.monitor = self._door.failures
        try:
            self.socket.bind(_numeric(address))
        except zmq.ZMQError as error:
            self.close()
            raise _cannot_listen(address, error) from None
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)  # with the number of a port that was chosen

    def refused(self) -> int:
        """How many attempts to connect have failed since the last call, because of their secret; of many not all are counted. `monitor` has
        input then. Nobody has to call it."""
        count = 0
        while self.monitor.poll(0):
            self.monitor.recv()
            count += 1
        return count

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket and end the gatekeeper; the context can be terminated then, which sends what is left. May be called twice."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.socket.close(linger=linger_ms)
        self._door.close()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
            self._gatekeeper = None


def _numeric(address: str) -> str:
    """The same address with the host's number instead of its name: libzmq listens on numbers only."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        found = getaddrinfo(host.strip("[]"), None, type=SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        return address
    return f"tcp://[{found}]:{port}" if ":" in str(found) else f"tcp://{found}:{port}"


def _cannot_listen(address: str, error: zmq.ZMQError) -> StagesError:
    where = address.removeprefix("tcp://")
    if error.errno == errno.EADDRINUSE:
        return StagesError(f"{where} is taken; choose another port")
    if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL, errno.EINVAL):
        return StagesError(f"this machine has no address {where}")
    return StagesError(f"cannot listen on {where}: {error.strerror}")


class Refused(Exception):
    """The other side does not have the same secret, or only one side has one."""


class Lost(Exception):
    """The connection was there, and is gone."""


class Connection:
    """A connected socket. It keeps trying while nobody listens; its user limits the time."""

    def __init__(
        self, context: zmq.Context, kind: int, address: str, secret: NodeSecret | None, identity: bytes = b""
    ) -> None:
        """`identity` is the name by which a ROUTER knows it. Raises StagesError if the address is not one."""
        self.socket = context.socket(kind, SocketOfPieces)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        _prepare(self.socket, address)
        if secret is not None:
            self.socket.curve_serverkey = secret.listens.public
            self.socket.curve_publickey, self.socket.curve_secretkey = secret.connects.public, secret.connects.secret
        events = FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor = self.socket.get_monitor_socket(events)
        self.is_there, self._cuts = False, 0
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise StagesError(f"{address.removeprefix('tcp://')} is not an address: {error.strerror}") from None

    def send(self, *frames: bytes) -> None:
        """Queue a message. One that was refused, or lost, goes nowhere, and `news` says so: to wait until it can be sent could be forever."""
        with suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.DONTWAIT)

    def news(self) -> None:
        """Read what became of the connection; `monitor` has input then. Raises Refused or Lost."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_there = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._cuts + 1 < CUTS:
                self._cuts += 1
            elif event & FAILED:
                raise Refused
            elif self.is_there:
                raise Lost

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is left is sent when the context is terminated. May be called twice."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
