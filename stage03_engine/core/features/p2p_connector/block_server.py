"""The producer's end of the links: a thread that keeps blocks until a consumer has them, and sends them to whoever asks.

The thread has all state. What the steps say comes as letters, which it reads before what came over the network: so a consumer that was told of
blocks finds them. A block is read where it lies, in the KV cache, while it stays in use; its checksum is made then, so whatever happens to
the bytes on their way is noticed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Thread

import msgspec
import zmq

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.block_store import checksum_of, compatibility_hash
from stage03_engine.core.features.p2p_connector.messages import (
    WINDOW,
    Block,
    Done,
    End,
    Want,
    address_of,
    decode_of_consumer,
    encode,
)
from stage03_engine.messages import MALFORMED
from stage03_engine.nodes.hub import drain
from stage03_engine.nodes.mailbox import Mailbox
from stage03_engine.nodes.secure_sockets import Listener, read_secret
from stagetrace import trace

logger = logging.getLogger(__name__)
FOREIGN = "it is of another model, or has another number format or block size"


class Offer(msgspec.Struct):
    """The blocks of one request by hash, how long they stay if nobody asks, and those that are named twice.

    While the request runs they stay: nobody can ask yet, and the rest of a long prompt may take longer than `hold_seconds`."""

    until: float = math.inf
    blocks: dict[bytes, int] = {}
    more: list[int] = []


class BlockServer:
    """Listens on kv_ip and kv_port. Raises StagesError if it cannot, ConfigError without a secret."""

    def __init__(self, config: VllmConfig, read: Callable[[int], bytes]) -> None:
        transfer = config.kv_transfer_config
        self._identity, self._hold, self._read = compatibility_hash(config), transfer.hold_seconds, read
        self._context = zmq.Context()
        address = "tcp://" + address_of(transfer.kv_ip, transfer.kv_port or "*")
        self._listener = Listener(self._context, zmq.ROUTER, address, read_secret(config.node_config))
        self.port = int(self._listener.address.rpartition(":")[2])
        self._mail: Mailbox[Callable[[], object]] = Mailbox()
        self._offers: dict[int, Offer] = {}
        self._freed, self._news = list[int](), Condition()
        self._error: BaseException | None = None
        self._is_ending = False
        self._thread = Thread(target=self._run, name="kv-server", daemon=True)
        self._thread.start()

    # From the thread that runs the steps

    def offer(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        """(block, its hash, its place): from now on they can be asked for."""
        self._mail.put(partial(self._offer, saves))

    def withdraw(self, places: Sequence[int]) -> None:
        """Nobody will ask for these."""
        for place in places:
            self._mail.put(partial(self._release, place, "withdrawn", None))

    def told(self, places: Sequence[int]) -> None:
        """Somebody may ask for these now."""
        for place in places:
            self._mail.put(partial(self._hold_on, place))

    def freed(self, wait_seconds: float) -> list[int]:
        """Blocks that need not stay any more; waits up to `wait_seconds` for one. Raises what has ended the thread."""
        with self._news:
            self._news.wait_for(lambda: self._freed or self._error, wait_seconds)
            if self._error is not None:
                raise self._error
            freed, self._freed = self._freed, []
        return freed

    def shutdown(self) -> None:
        """Blocks that are still offered are lost to others."""
        self._mail.put(self._stop)
        self._thread.join()

    # In the thread

    def _stop(self) -> None:
        self._is_ending = True

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._mail.fileno(), zmq.POLLIN)
        try:
            while not self._is_ending:
                self._turn(poller)
        except BaseException as error:
            with self._news:
                self._error = error
                self._news.notify_all()
        finally:
            self._listener.close()
            self._mail.close()
            self._context.term()

    def _turn(self, poller: zmq.Poller) -> None:
        now, untils = time.monotonic(), [offer.until for offer in self._offers.values()]
        first = min(untils, default=math.inf)
        poller.poll(None if first == math.inf else max(0, int(1000 * (first - now)) + 1))
        messages = list(drain(self._listener.socket))
        for letter in self._mail.take():
            letter()
        for peer, *payload in messages:
            self._received(peer, payload)
        self._expire()

    def _offer(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        for block, block_hash, place in saves:
            offer = self._offers.setdefault(place, Offer())
            if block_hash in offer.blocks:  # a request that was preempted offers them again
                offer.more.append(block)
            else:
                offer.blocks[block_hash] = block

    def _hold_on(self, place: int) -> Offer:
        """From now on for `hold_seconds`."""
        offer = self._offers.get(place) or Offer()
        offer.until = time.monotonic() + self._hold
        return offer

    def _received(self, peer: bytes, payload: list[bytes]) -> None:
        try:
            message = decode_of_consumer(payload[0])
        except (IndexError, *MALFORMED) as error:
            logger.warning("ignored a malformed message of a consumer, which may have another version: %s", error)
            return
        if isinstance(message, Done):
            self._release(message.place, "done", message.cause)
        elif message.identity != self._identity:
            self._send(peer, End(message.place, FOREIGN))
        else:
            self._answer(peer, message)

    def _answer(self, peer: bytes, want: Want) -> None:
        """Send what there is, up to the first gap: what comes after it is of no use."""
        sent, size = 0, 0
        offer = self._hold_on(want.place)
        for block_hash in want.hashes[:WINDOW]:
            if (block := offer.blocks.get(block_hash)) is None:
                break
            data = self._read(block)
            self._send(peer, Block(want.place, block_hash, checksum_of(block_hash, data), data))
            sent, size = sent + 1, size + len(data)
        end = End(want.place)
        if trace.on:
            end.cause = trace.emit("kv_p2p.sent", req=want.req, cause=want.cause, num_blocks=sent, bytes=size)
        self._send(peer, end)

    def _send(self, peer: bytes, message: Block | End) -> None:
        """What a peer that is gone should get is dropped; `hold_seconds` frees its blocks."""
        self._listener.socket.send_multipart([peer, encode(message)])

    def _release(self, place: int, why: str, cause: str | None) -> None:
        if (offer := self._offers.pop(place, None)) is not None:
            blocks = [*offer.blocks.values(), *offer.more]
            if trace.on:
                trace.emit("kv_p2p.released", cause=cause, num_blocks=len(blocks), why=why)
            self._free(blocks)

    def _free(self, blocks: list[int]) -> None:
        with self._news:
            self._freed += blocks
            self._news.notify_all()

    def _expire(self) -> None:
        now = time.monotonic()
        for place in [place for place, offer in self._offers.items() if offer.until <= now]:
            logger.warning("Nobody has asked for a request's KV-cache blocks for %.0f s: they are freed.", self._hold)
            self._release(place, "time over", None)
