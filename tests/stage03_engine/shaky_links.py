"""A connector for tests: `P2pZmqConnector` over links that lose, delay, reorder, repeat, tear and mix up what is sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.p2p_connector.block_fetcher import BlockFetcher, Peer
from stage03_engine.core.features.p2p_connector.block_server import BlockServer
from stage03_engine.core.features.p2p_connector.messages import Block, Done, End, Want
from stage03_engine.core.features.p2p_connector.p2p import P2pZmqConnectorScheduler
from stage03_engine.core.features.p2p_connector.p2p_copies import P2pZmqConnectorWorker

rng = random.Random()
"""Decides what happens; a test seeds it."""
seen: set[str] = set()
"""What has happened."""
fates: list[str] = ["arrives"]
"""Those that are possible now; the more often a name is here, the likelier."""
ALL = (
    *["arrives"] * 12, "is lost", "is late", "is late", "comes twice", "is torn", "has lost its end", "is another's", "is of another place", "is no message",
)  # fmt: skip


def what_arrives(kept: list[Any], message: Any) -> Iterator[Any]:
    """Of this message, and of those that were kept back."""
    fate = rng.choice(fates)
    if not isinstance(message, Block) and fate in ("is torn", "has lost its end", "is another's"):
        fate = "arrives"
    seen.add(f"{type(message).__name__} {fate}")
    if fate == "is late":
        kept.append(message)
        return
    if fate == "is torn":
        where = rng.randrange(len(message.data))
        message.data = message.data[:where] + bytes([message.data[where] ^ 1]) + message.data[where + 1 :]
    elif fate == "has lost its end":
        message.data = message.data[: rng.randrange(len(message.data))]
    elif fate == "is another's":
        message.block_hash = rng.randbytes(32)
    elif fate == "is of another place":
        message.place += rng.choice((-1, 1))
    if fate != "is lost":
        yield b"\xc1" if fate == "is no message" else message
    if fate == "comes twice":
        yield message
    while kept and rng.random() < 0.5:
        yield kept.pop(rng.randrange(len(kept)))


class ShakyServer(BlockServer):
    """The producer's end."""

    _kept: list[Any] | None = None

    def _send(self, peer: bytes, message: Block | End) -> None:
        self._kept = [] if self._kept is None else self._kept
        for each in what_arrives(self._kept, message):
            if isinstance(each, bytes):
                self._listener.socket.send_multipart([peer, each])
            else:
                super()._send(peer, msgspec.structs.replace(each))


class ShakyFetcher(BlockFetcher):
    """The consumer's end."""

    _late: list[Any] | None = None

    def _send(self, peer: Peer, message: Want | Done) -> None:
        self._late = [] if self._late is None else self._late
        for each in what_arrives(self._late, message):
            if isinstance(each, bytes):
                peer.connection.send(each)
            else:
                super()._send(peer, each)


class ShakyScheduler(P2pZmqConnectorScheduler):
    """The scheduler's side."""

    @staticmethod
    def make_fetcher(config: VllmConfig) -> BlockFetcher:
        return ShakyFetcher(config)


class ShakyWorker(P2pZmqConnectorWorker):
    """The worker's side."""

    @staticmethod
    def make_server(config: VllmConfig, read: Callable[[int], bytes]) -> BlockServer:
        return ShakyServer(config, read)
