"""Another machine of a service: it has no API server, and works for the head (`serve --headless`; vllm/entrypoints/cli/serve.py, run_headless).

`Member` connects to the head, asks to join, and ends when the head ends or can no longer be reached. What it is asked to do is the room's: a
subclass answers `obey`, `passed`, `pass_on`, `reap`.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import msgspec
import zmq

from stage03_engine.args.log import announce, name_process
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, EngineStartError
from stage03_engine.messages import MALFORMED
from stage03_engine.nodes.hub import LAST_WORDS_MS, drain, join_seconds
from stage03_engine.nodes.mailbox import Mailbox
from stage03_engine.nodes.messages import CONTROL, Bye, Join, Ping, Refusal, Welcome, encode
from stage03_engine.nodes.secure_sockets import Connection, Lost, Refused, read_secret
from stage03_engine.tracing import open_trace
from stagetrace import trace

logger = logging.getLogger(__name__)
TURN_MS = 500
Order = TypeVar("Order", bound=msgspec.Struct)
"""What the head asks for beside Welcome, Refusal, Ping and Bye."""


class Member(Generic[Order]):
    """The connection to the head. One thread has the sockets and all state; others, and signals, leave letters in `mail`."""

    FLAGS = ""
    """Those that say where the head is."""

    def __init__(self, config: VllmConfig, address: str, numbers: list[int], what: str) -> None:
        """`numbers` and `what` (for the log) say what can run here. Raises ConfigError without a secret, StagesError for what is no address."""
        self.config, self.head, self.numbers = config, address.removeprefix("tcp://"), numbers
        self._what, self._name = what, f"{platform.node()} (pid {os.getpid()})"
        secret = read_secret(config.node_config)
        name = f"Node_{numbers[0]}"
        trace.rename(name)
        name_process(name)
        announce(config)
        if secret is None:
            logger.warning(
                "The connection to %s is unprotected: anyone on its path can read and change the messages.", self.head
            )
        self.context = zmq.Context()
        self.connection = Connection(self.context, zmq.DEALER, address, secret)
        self._has_asked = self._has_joined = False
        self.has_head_ended = False  # normally
        self._exit_code: int | None = None
        self.mail: Mailbox[Callable[[], object]] = Mailbox()
        self.poller = zmq.Poller()
        for source in (self.connection.socket, self.connection.monitor, self.mail.fileno()):
            self.poller.register(source, zmq.POLLIN)

    def decode(self, payload: bytes) -> Welcome | Refusal | Ping | Bye | Order:
        """A control message of the head. Raises one of MALFORMED."""
        raise NotImplementedError

    def join(self, name: str) -> Join:
        """What this machine offers."""
        raise NotImplementedError

    def obey(self, order: Order) -> None:
        """Carry out what the head asks for."""
        raise NotImplementedError

    def passed(self, first: bytes, rest: list[bytes]) -> None:
        """What is no control message. Raises ValueError for what is nothing."""
        raise ValueError("no control message")

    def pass_on(self, source: zmq.Socket) -> None:
        """A socket that a room has added to `poller` has input."""
        raise NotImplementedError

    def reap(self) -> None:
        """End what runs here."""
        raise NotImplementedError

    def work(self) -> int:
        """Work until the head, or a signal, ends it; returns the exit code. Raises StagesError if this machine cannot join, when the head
        is lost, and when it ends for a reason."""
        try:
            with self._signals():
                return self._run()
        finally:
            self.reap()
            self.connection.close(LAST_WORDS_MS)
            self.context.destroy(LAST_WORDS_MS)
            self.mail.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside the `with` block SIGTERM and SIGINT end this node."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._signalled) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._exit_code is not None else handler)

    def _signalled(self, number: int, frame: object) -> None:
        self.mail.put(partial(self._stop, signal.Signals(number).name))

    def _stop(self, why: str) -> None:
        logger.info("%s: this node ends.", why)
        self.report(Bye())
        self._exit_code = 0

    def _run(self) -> int:
        logger.info("%s for the head at %s; connecting.", self._what, self.head)
        seconds = join_seconds(self.config)
        deadline = time.monotonic() + seconds
        while self._exit_code is None:
            self._turn()
            if not self._has_joined and time.monotonic() > deadline:
                raise EngineStartError(f"no head answered at {self.head} within {seconds:.0f} s ({self.FLAGS})")
        return self._exit_code

    def _ask_to_join(self) -> None:
        """The first message, sent only once the connection is there, so that the head can compare the clocks."""
        join = self.join(self._name)
        if trace.on:
            join.cause = trace.emit("node.join_sent", numbers=self.numbers, head=self.head)
        self.report(join)
        self._has_asked = True

    def report(self, report: msgspec.Struct) -> None:
        """Tell the head."""
        self.connection.send(CONTROL, encode(report))

    def _turn(self) -> None:
        """Handle what has come, from the head first; wait for it for a moment."""
        ready = [source for source, _ in self.poller.poll(TURN_MS)]
        self._hear()
        for source in ready:
            if source == self.mail.fileno():
                for letter in self.mail.take():
                    letter()
            elif source is self.connection.monitor:
                self._news()
            elif source is not self.connection.socket:
                self.pass_on(source)

    def _news(self) -> None:
        """The connection has changed. What the head said before that comes first."""
        self._hear()
        try:
            if self._exit_code is None:
                self.connection.news()
                if self.connection.is_there and not self._has_asked:
                    self._ask_to_join()
        except Refused:
            raise EngineStartError(
                f"the head at {self.head} refuses this node: the secrets differ, or only one side has one (--node-secret-file, "
                "STAGES_NODE_SECRET)"
            ) from None
        except Lost:
            raise EngineStartError(
                f"the head at {self.head} is lost: it has died, or the network to it is cut; this node ends"
            ) from None

    def _hear(self) -> None:
        """What the head says."""
        for first, *rest in drain(self.connection.socket):
            try:
                if first != CONTROL:
                    self.passed(first, rest)
                    continue
                order = self.decode(rest[0])
            except (IndexError, *MALFORMED) as error:
                logger.warning("ignored a malformed message of the head, which may have another version: %s", error)
                continue
            if isinstance(order, Welcome):
                self._welcome(order)
            elif isinstance(order, Refusal):
                raise ConfigError(f"the head at {self.head} refuses this node: {order.message}")
            elif isinstance(order, Bye):
                self._end(order.why)
            elif not isinstance(order, Ping):
                self.obey(order)

    def _welcome(self, welcome: Welcome) -> None:
        self._has_joined = True
        open_trace(self.config, run_id=welcome.run_id)
        if trace.on:
            trace.emit("node.welcomed", cause=welcome.cause)
            trace.flush()
        logger.info("Joined the head at %s.", self.head)

    def _end(self, why: str) -> None:
        if why:
            raise EngineStartError(f"the head at {self.head} ended: {why}")
        logger.info("The head ends, and so does this node.")
        self.has_head_ended = True
        self._exit_code = 0
