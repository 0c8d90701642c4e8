"""The head's side of a service on several machines.

`Hub` listens for the other machines, decides which belong to it, and notices when one is gone. What a machine offers, and what it is asked to
do, is the room's: a subclass answers `problem`, `joined`, `heard`, `passed`, `lost`, `failed`.
(vLLM: the engines of a node connect to the head themselves, through several ports; the workers of a node meet in torch.distributed.)
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import msgspec
import zmq

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.messages import MALFORMED
from stage03_engine.nodes.mailbox import Mailbox
from stage03_engine.nodes.messages import CONTROL, Bye, Join, Ping, Refusal, Welcome, encode
from stage03_engine.nodes.sameness import differences
from stage03_engine.nodes.secure_sockets import WARN_SECONDS, Listener, read_secret
from stagetrace import trace

logger = logging.getLogger(__name__)
PING_SECONDS = 0.5
"""How often the head sends a ping, which fails once the connection is gone."""
LAST_WORDS_MS = 1000
JOIN_SECONDS = 600.0
Report = TypeVar("Report", bound=msgspec.Struct)
"""What nodes report beside Join and Bye."""


def join_seconds(config: VllmConfig) -> float:
    """How long the machines of a service wait for each other when they start."""
    asked = getattr(getattr(config, "parallel_config", None), "distributed_timeout_seconds", None)
    return asked or JOIN_SECONDS


def drain(socket: zmq.Socket) -> Iterator[list[bytes]]:
    """All messages that are there."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)


class Hub(Generic[Report]):
    """The thread that talks to the other machines. It has all state; other threads leave their wishes in `mail`."""

    FLAGS = ""
    """Those that say where the head listens."""

    def __init__(self, config: VllmConfig, address: str, facts: dict[str, str]) -> None:
        """Listen; `start` begins to hear. Raises ConfigError if it cannot listen, or if there is no secret."""
        secret = read_secret(config.node_config)
        self.context = zmq.Context()
        try:
            self._listener = Listener(self.context, zmq.ROUTER, address, secret)
        except StagesError as error:
            self.context.term()
            raise ConfigError(f"{error} ({self.FLAGS})") from None
        self._socket = self._listener.socket
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a node that is gone is an error
        self._is_protected, self._facts = secret is not None, facts
        self.address = self._listener.address
        self.nodes: dict[bytes, Join] = {}  # by the routing id of their connection
        self.mail: Mailbox[Callable[[], object]] = Mailbox()
        self.poller = zmq.Poller()
        self._next_ping = self._next_warning = 0.0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="node-hub", daemon=True)

    def decode(self, payload: bytes) -> Join | Bye | Report:
        """A control message of a node. Raises one of MALFORMED."""
        raise NotImplementedError

    def problem(self, join: Join) -> str:
        """Why a machine cannot join, beside what differs; empty if it can."""
        raise NotImplementedError

    def joined(self, peer: bytes, join: Join) -> None:
        """A machine belongs to the service from now on."""
        raise NotImplementedError

    def heard(self, peer: bytes, report: Report) -> None:
        """A machine that has joined says something."""
        raise NotImplementedError

    def passed(self, peer: bytes, first: bytes, rest: list[bytes]) -> None:
        """What is no control message. Raises ValueError for what is nothing."""
        raise ValueError("no control message")

    def pass_on(self, source: zmq.Socket) -> None:
        """A socket that a room has added to `poller` has input."""
        raise NotImplementedError

    def lost(self, join: Join, why: str) -> None:
        """A machine is gone."""
        raise NotImplementedError

    def failed(self, why: str) -> None:
        """A bug ends the thread: whoever waits must hear it."""
        raise NotImplementedError

    def pinged(self) -> None:
        """Twice a second."""

    def closed(self) -> None:
        """The thread ends: what the room has opened is closed."""

    def start(self) -> None:
        """Hear the machines from now on."""
        where = self.address.removeprefix("tcp://")
        if not self._is_protected:
            logger.warning(
                "%s listens unprotected: anyone who reaches it can use the engines and read every message.", where
            )
        if trace.on:
            trace.emit("node.listening", address=where, encrypted=self._is_protected)
        self._thread.start()

    def close(self, why: str = "") -> None:
        """Tell the nodes to end, and end the thread. `why` is empty if all is well. May be called twice."""
        self.mail.put(partial(self._end, why))
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close()

    def _run(self) -> None:
        for source in (self._socket, self.mail.fileno(), self._listener.monitor):
            self.poller.register(source, zmq.POLLIN)
        try:
            while not self._is_ending:
                self._turn()
        except Exception as error:  # a bug of ours must reach those who wait, not leave them hanging
            logger.exception("the hub of the nodes failed")
            self.failed(f"the hub of the nodes failed: {error!r}")
        finally:
            self._close()

    def _close(self) -> None:
        self.closed()
        self._listener.close(LAST_WORDS_MS)
        self.mail.close()
        self.context.term()

    def _turn(self) -> None:
        """Handle what has come; wait for it until the next ping."""
        for source, _ in self.poller.poll(int(PING_SECONDS * 1000)):
            if source is self._socket:
                self._hear()
            elif source is self._listener.monitor:
                self._refused_connections()
            elif source == self.mail.fileno():
                for letter in self.mail.take():
                    letter()
            else:
                self.pass_on(source)
        if time.monotonic() >= self._next_ping:
            self._next_ping = time.monotonic() + PING_SECONDS
            for peer in list(self.nodes):
                self.send(peer, Ping())
            self.pinged()

    def _hear(self) -> None:
        """What nodes say."""
        for peer, first, *rest in drain(self._socket):
            try:
                if first == CONTROL:
                    self._obey(peer, self.decode(rest[0]))
                else:
                    self.passed(peer, first, rest)
            except (IndexError, *MALFORMED) as error:
                logger.warning("ignored a malformed message of a node, which may have another version: %s", error)

    def _obey(self, peer: bytes, report: Join | Bye | Report) -> None:
        if isinstance(report, Join):
            self._join(peer, report)
        elif peer not in self.nodes:
            pass
        elif isinstance(report, Bye):
            self._lose(peer, "it was told to end")
        else:
            self.heard(peer, report)

    def _join(self, peer: bytes, join: Join) -> None:
        """A machine that does not fit is refused, in the same words on both sides."""
        for other in {owner for number in join.numbers if (owner := self.peer_of(number)) is not None}:
            self.send(other, Ping())  # is it still there?
        different = differences(self._facts, join.facts)
        if problem := f"{different}; both sides must have the same" if different else self.problem(join):
            logger.error("Node %s cannot join: %s", join.name, problem)
            self.send(peer, Refusal(problem))
            return
        self.nodes[peer] = join
        welcome = Welcome(trace.run_id)
        if trace.on:
            offset = time.monotonic_ns() - join.monotonic_ns
            welcome.cause = trace.emit(
                "node.joined", cause=join.cause, node=join.name, numbers=join.numbers, clock_offset_ns=offset
            )
        if self.send(peer, welcome):
            self.joined(peer, join)

    def peer_of(self, number: int) -> bytes | None:
        """The connection to the machine that has this engine, or this number."""
        return next((peer for peer, join in self.nodes.items() if number in join.numbers), None)

    def send(self, peer: bytes, order: msgspec.Struct) -> bool:
        """False if the machine is gone."""
        return self.send_frames(peer, [CONTROL, encode(order)])

    def send_frames(self, peer: bytes, frames: list[bytes]) -> bool:
        """False if the machine is gone."""
        try:
            self._socket.send_multipart([peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer, "it was killed, or the network to it is cut")
            return False
        return True

    def _lose(self, peer: bytes, why: str) -> None:
        join = self.nodes.pop(peer, None)
        if join is None:
            return
        if trace.on:
            trace.emit("node.lost", node=join.name, numbers=join.numbers, message=why)
        self.lost(join, why)

    def _refused_connections(self) -> None:
        if self._listener.refused() and time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARN_SECONDS
            logger.warning(
                "Refused a connection at %s: a node without the secret of this service, or with another one.",
                self.address.removeprefix("tcp://"),
            )

    def _end(self, why: str) -> None:
        for peer in list(self.nodes):
            self.send(peer, Bye(why))
        self._is_ending = True
