"""The consumer's end of the links: a thread that brings the blocks of requests that wait, a window at a time, from the engines that computed them.

What it cannot use it does not take: a block that is torn, that nobody asked for, or that comes too late is not there, and its tokens are computed.
A producer that dies, or that cannot be reached, costs only what it would have sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from threading import Lock, Thread

import msgspec
import zmq

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.block_parts import part_bytes
from stage03_engine.core.features.kv_transfer.block_store import checksum_of, compatibility_hash
from stage03_engine.core.features.kv_transfer.reader import Found
from stage03_engine.core.features.p2p_connector.messages import (
    WINDOW,
    Done,
    End,
    Source,
    Want,
    decode_of_producer,
    encode,
    source_of,
)
from stage03_engine.core.request import Request
from stage03_engine.errors import StagesError
from stage03_engine.messages import MALFORMED
from stage03_engine.nodes.hub import drain
from stage03_engine.nodes.mailbox import Mailbox
from stage03_engine.nodes.secure_sockets import Connection, Lost, NodeSecret, Refused, read_secret
from stagetrace import trace

logger = logging.getLogger(__name__)


class Fetch(msgspec.Struct):
    """The blocks of one request on their way."""

    req: str
    source: Source
    found: Found
    hashes: list[bytes]
    done: Future[None]
    window: list[bytes] = []  # that the producer was asked for last
    came: dict[bytes, bytes] = {}  # of them
    asked: str | None = None  # the event
    same: list[Fetch] = []  # those of other answers to the prompt, with n above 1: they get what this one gets


class Peer:
    """A producer, and what is on its way from it."""

    def __init__(self, context: zmq.Context, address: str, secret: NodeSecret | None, until: float) -> None:
        self.address, self.fetches, self.until = address, dict[int, Fetch](), until
        self.connection = Connection(context, zmq.DEALER, f"tcp://{address}", secret)
        self.is_foreign = False


class BlockFetcher:
    """A Reader (kv_transfer/reader.py) of other engines' blocks. Raises ConfigError without a secret.

    A producer that has not answered for `max_read_seconds`, and from which nobody waits for blocks, may be dead: its connection is closed, even with messages
    unsent. So connections lead only to producers that are there, and to some that were asked just now."""

    def __init__(self, config: VllmConfig) -> None:
        self._identity, self._secret = compatibility_hash(config), read_secret(config.node_config)
        self._block_bytes = sum(part_bytes(config))
        self._most_seconds: float = config.kv_transfer_config.max_read_seconds
        self._mail: Mailbox[Callable[[], object]] = Mailbox()
        self._lock, self._is_ending = Lock(), False
        self._context, self._poller = zmq.Context(), zmq.Poller()
        self._poller.register(self._mail.fileno(), zmq.POLLIN)
        self._peers: dict[str, Peer] = {}
        self._thread = Thread(target=self._run, name="kv-fetcher", daemon=True)
        self._thread.start()

    # From the engine's thread

    def read(self, request: Request, found: Found, hashes: list[bytes]) -> Future[None]:
        """Bring these blocks in order, as many as there are."""
        source, done = source_of(request), Future[None]()
        assert source is not None
        done.set_running_or_notify_cancel()
        self._mail.put(partial(self._begin, Fetch(request.request_id, source, found, hashes, done)))
        return done

    def end(self, found: Found) -> None:
        """Nothing more is added to it; its producer may let go of what is left."""
        with self._lock:
            found.is_over = True
        self._mail.put(partial(self._drop, found))

    def tell_done(self, source: Source) -> None:
        """Nothing of this place is needed."""
        self._mail.put(partial(self._tell_done, source))

    def shutdown(self) -> None:
        """What is on its way is not waited for."""
        self._mail.put(self._stop)
        self._thread.join()

    # In the thread

    def _stop(self) -> None:
        self._is_ending = True

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._turn()
        except BaseException as error:
            for fetch in [fetch for peer in self._peers.values() for fetch in peer.fetches.values()]:
                fetch.done.set_exception(error)
            raise
        finally:
            for peer in self._peers.values():
                peer.connection.close()
            self._mail.close()
            self._context.term()

    def _turn(self) -> None:
        now, untils = time.monotonic(), [peer.until for peer in self._idle_unreached()]
        self._poller.poll(max(0, int(1000 * (min(untils) - now)) + 1) if untils else None)
        for peer in list(self._peers.values()):
            for payload in drain(peer.connection.socket):
                self._received(peer, payload)
            self._news(peer)
        for letter in self._mail.take():
            letter()
        for peer in self._idle_unreached():
            if peer.until <= time.monotonic():
                self._forget(peer)

    def _idle_unreached(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if not peer.fetches and not peer.connection.is_there]

    def _news(self, peer: Peer) -> None:
        try:
            peer.connection.news()
        except (Lost, Refused) as error:
            refused = isinstance(error, Refused)
            why = (
                "it does not have the same secret (--node-secret-file)"
                if refused
                else "it has died, or the network is cut"
            )
            self._lose(peer, why)

    def _lose(self, peer: Peer, why: str) -> None:
        """The blocks that have come are used. No warning if nobody waits for others: it may have ended as it should."""
        if peer.fetches:
            logger.warning(
                "The engine at %s sends no more KV-cache blocks: %s. They are computed here.", peer.address, why
            )
        if trace.on:
            trace.emit("kv_p2p.lost", peer=peer.address, message=why, num_requests=len(peer.fetches))
        self._forget(peer)
        for fetch in peer.fetches.values():
            self._end(fetch)

    def _forget(self, peer: Peer) -> None:
        for source in (peer.connection.socket, peer.connection.monitor):
            self._poller.unregister(source)
        peer.connection.close()
        del self._peers[peer.address]

    def _peer(self, address: str) -> Peer:
        """Raises StagesError for what is no address."""
        if (peer := self._peers.get(address)) is None:
            until = time.monotonic() + self._most_seconds
            peer = self._peers[address] = Peer(self._context, address, self._secret, until)
            for source in (peer.connection.socket, peer.connection.monitor):
                self._poller.register(source, zmq.POLLIN)
        return peer

    def _begin(self, fetch: Fetch) -> None:
        try:
            peer = self._peer(fetch.source.address)
        except StagesError as error:
            logger.warning("KV-cache blocks cannot be fetched: %s", error)
            fetch.done.set_result(None)
            return
        if (other := peer.fetches.get(fetch.source.place)) is not None:
            other.same.append(fetch)
            return
        if peer.is_foreign or fetch.found.is_over:
            self._finish(peer, fetch)
            return
        peer.fetches[fetch.source.place] = fetch
        self._want(peer, fetch)

    def _want(self, peer: Peer, fetch: Fetch) -> None:
        first = len(fetch.found.blocks)
        fetch.window, fetch.came = fetch.hashes[first : first + WINDOW], {}
        if trace.on:
            count = len(fetch.window)
            fetch.asked = trace.emit(
                "kv_p2p.asked", req=fetch.req, peer=peer.address, first=fetch.found.first + first, num_blocks=count
            )
        self._send(peer, Want(self._identity, fetch.source.place, fetch.window, fetch.req, fetch.asked))

    def _send(self, peer: Peer, message: Want | Done) -> None:
        peer.connection.send(encode(message))

    def _received(self, peer: Peer, payload: list[bytes]) -> None:
        try:
            [frame] = payload
            message = decode_of_producer(frame)
        except MALFORMED as error:
            logger.warning("ignored a malformed message of a producer, which may have another version: %s", error)
            return
        if (fetch := peer.fetches.get(message.place)) is None:
            return  # too late
        if isinstance(message, End):
            self._window_ended(peer, fetch, message)
        elif len(message.data) != self._block_bytes:
            return  # whatever its checksum says: it would not fit its place
        elif message.block_hash in fetch.window and message.checksum == checksum_of(message.block_hash, message.data):
            fetch.came[message.block_hash] = message.data

    def _window_ended(self, peer: Peer, fetch: Fetch, end: End) -> None:
        """Keep what has come without a gap; ask for more if nothing is missing."""
        if end.problem and not peer.is_foreign:
            peer.is_foreign = True
            logger.warning("No KV-cache block of the engine at %s is used: %.200r", peer.address, end.problem)
        whole = [fetch.came[each] for each in fetch.window[: self._without_gap(fetch)]]
        with self._lock:
            goes_on = not fetch.found.is_over
            if goes_on:
                fetch.found.blocks += whole
        cause = None
        if trace.on:
            count, size = len(whole), sum(map(len, whole))
            missing = len(fetch.window) - count
            cause = trace.emit(
                "kv_p2p.received", req=fetch.req, cause=end.cause, num_blocks=count, missing=missing, bytes=size
            )
        if goes_on and len(whole) == len(fetch.window) and len(fetch.found.blocks) < len(fetch.hashes):
            self._want(peer, fetch)
        else:
            self._finish(peer, fetch, cause)

    @staticmethod
    def _without_gap(fetch: Fetch) -> int:
        return next((i for i, each in enumerate(fetch.window) if each not in fetch.came), len(fetch.window))

    def _finish(self, peer: Peer, fetch: Fetch, cause: str | None = None) -> None:
        """The producer may let go."""
        peer.fetches.pop(fetch.source.place, None)
        self._send(peer, Done(fetch.source.place, cause))
        self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        """Nothing more comes for it; whoever waited for the same blocks has them too."""
        have = dict(zip(fetch.hashes, fetch.found.blocks))
        with self._lock:
            for other in fetch.same:
                if not other.found.is_over:
                    other.found.blocks += [have[each] for each in takewhile(have.__contains__, other.hashes)]
        for each in (fetch, *fetch.same):
            each.done.set_result(None)

    def _drop(self, found: Found) -> None:
        """If it is still on its way, it is not waited for."""
        for peer in list(self._peers.values()):
            for fetch in [each for each in peer.fetches.values() if each.found is found]:
                self._finish(peer, fetch, fetch.asked)

    def _tell_done(self, source: Source) -> None:
        try:
            self._send(self._peer(source.address), Done(source.place))
        except StagesError as error:
            logger.warning("KV-cache blocks cannot be given back: %s", error)
