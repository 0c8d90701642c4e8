"""Producers that are none, or speak nonsense: a request gets the tokens of one engine, and no connection is kept to them."""

from __future__ import annotations

import itertools
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from patience import PATIENCE, wait_until
from small_gpt2 import first_layers
from test_p2p_connector import HOW, PROMPTS, SECRET, Pair, core_of, params_of
from test_strangers import GIANT, GIANT_COMMAND, GREETING

from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.kv_transfer.block_store import checksum_of
from stage03_engine.core.features.p2p_connector.block_server import BlockServer
from stage03_engine.core.features.p2p_connector.messages import Block, End, Want, encode
from stage03_engine.core.features.p2p_connector.p2p import LISTENING
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset_prefix_cache
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.nodes.secure_sockets import Connection, Listener, NodeSecret
from stage03_engine.sampling_params import SamplingParams

LONG, SHORT = PROMPTS[0], [7, 8]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(first_layers(tmp_path_factory.mktemp("peers") / "model", 2))


@pytest.fixture(scope="module")
def consumer(model: str) -> Iterator[EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGES_NODE_SECRET", SECRET)
        core = core_of(model, "kv_consumer", extra={"max_read_seconds": 0.2})
    with producer(SECRET, ANSWERS["an end"]) as port:
        run(core, LONG, port)  # the first link of all opens what links share, and keeps it
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def expected(consumer: EngineCore) -> dict[tuple[int, ...], list[int]]:
    """Without another engine."""
    return {tuple(prompt): run(consumer, prompt, None) for prompt in (LONG, SHORT)}


def add(consumer: EngineCore, prompt: list[int], port: int | None) -> str:
    """A request whose blocks are said to be at that port."""
    place = {"remote_host": "127.0.0.1", "remote_port": port, "remote_request_id": next(_numbers)}
    where = None if port is None else {"do_remote_prefill": True, **place}
    params = SamplingParams(max_tokens=4, ignore_eos=True, kv_transfer_params=where, **HOW["greedy"])
    name = f"r{next(_numbers)}"
    consumer.add_request(EngineCoreRequest(name, prompt, params))
    return name


def steps(consumer: EngineCore) -> list[int]:
    """The tokens of the one request that runs."""
    tokens, end = list[int](), time.monotonic() + PATIENCE
    while consumer.has_unfinished_requests:
        assert time.monotonic() < end
        for output in consumer.step().outputs:
            tokens += output.new_token_ids
    return tokens


def run(consumer: EngineCore, prompt: list[int], port: int | None) -> list[int]:
    add(consumer, prompt, port)
    return steps(consumer)


def assert_all_free(consumer: EngineCore) -> None:
    pool = consumer.scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_usable
    for hook in consumer.scheduler.hooks:
        hook.check_invariants()


# Nobody is there


def fetches(consumer: EngineCore, port: int) -> None:
    reset_prefix_cache(consumer)
    run(consumer, LONG, port)


def gives_up(consumer: EngineCore, port: int) -> None:
    reset_prefix_cache(consumer)
    name = add(consumer, LONG, port)
    consumer.step()
    consumer.abort_requests([name])


def needs_nothing(consumer: EngineCore, port: int) -> None:
    """All of it is cached: the producer would only hear `Done`."""
    run(consumer, LONG, port)


def is_too_short(consumer: EngineCore, port: int) -> None:
    run(consumer, SHORT, port)


@pytest.mark.parametrize("meet", [fetches, gives_up, needs_nothing, is_too_short], ids=lambda each: each.__name__)
def test_of_many_dead_producers_no_connection_is_kept(
    meet: Callable[[EngineCore, int], None], consumer: EngineCore, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """Whatever it was that they were to hear."""
    run(consumer, LONG, None)
    with ExitStack() as stack:
        dead = [
            stack.enter_context(socket.socket()) for _ in range(12)
        ]  # bound, so nobody else gets the port; and deaf
        for each in dead:
            each.bind(("127.0.0.1", 0))
        meet(consumer, dead.pop().getsockname()[1])  # what is opened once is open then
        before = open_files()
        for each in dead:
            meet(consumer, each.getsockname()[1])
        wait_until(lambda: open_files() <= before, "connections to dead engines stay open")
    assert_all_free(consumer)
    assert run(consumer, LONG, None) == expected[tuple(LONG)]


def open_files() -> int:
    """Of this process: each socket of ZMQ has some."""
    return psutil.Process().num_fds()


# Somebody else is there


class Speaker(socketserver.ThreadingTCPServer):
    """Says something to whoever connects, and hears him out; `cut`: it does not even listen."""

    says, cut = b"", False
    daemon_threads = True

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            request.sendall(self.says)
            while not self.cut and request.recv(1 << 16):
                pass
        except ConnectionError:
            pass


@contextmanager
def stranger(says: bytes, cut: bool = False) -> Iterator[int]:
    """The port of one."""
    with Speaker(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        server.says, server.cut = says, cut
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


Answer = Callable[[Any], list[list[bytes]]]


@contextmanager
def producer(secret: str | None, answer: Answer = lambda want: []) -> Iterator[int]:
    """The port of one that speaks ZMQ, has that secret, and gives those messages for an answer."""
    keys, context = None if secret is None else NodeSecret(secret.encode()), zmq.Context()
    listener, is_over = Listener(context, zmq.ROUTER, "tcp://127.0.0.1:0", keys), threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            if listener.socket.poll(20):
                peer, *payload = listener.socket.recv_multipart()
                message = msgspec.msgpack.decode(payload[0])
                for frames in answer(Want(*message[1:])) if message[0] == "want" else []:
                    zmq.Socket.send_multipart(listener.socket, [peer, *frames])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.address.rpartition(":")[2])
    finally:
        is_over.set()
        thread.join()
        listener.close()
        context.term()


STRANGERS: dict[str, tuple[bytes, bool]] = {
    "says nothing": (b"", False),
    "hangs up": (b"", True),
    "says half a greeting": (GREETING[:11], False),
    "says half a greeting and hangs up": (GREETING[:11], True),
    "says a greeting": (GREETING, False),
    "says a greeting and hangs up": (GREETING, True),
    "greets without a lock": (GREETING.replace(b"CURVE", b"NULL\0"), False),
    "greets with a version to come": (GREETING[:10] + b"\x09" + GREETING[11:], False),
    "announces a giant": (GREETING + GIANT, False),
    "announces a giant command": (GREETING + GIANT_COMMAND, False),
    "sends a command cut short": (GREETING + b"\x04\xc8\x05READY", False),
    "speaks HTTP": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", False),
    "speaks at random": (os.urandom(1 << 16), False),
    "speaks zeros": (bytes(1 << 20), False),
}
BLOCK = 4 * 64  # bytes of one that is none


def of(message: Block | End) -> list[bytes]:
    """As it travels."""
    return [b"", encode(message)]


def whole(size: int) -> Answer:
    """One whose checksum is right."""

    def answer(want: Want) -> list[list[bytes]]:
        block_hash, data = want.hashes[0], bytes(size)
        return [of(Block(want.place, block_hash, checksum_of(block_hash, data), data)), of(End(want.place))]

    return answer


ANSWERS: dict[str, Answer] = {
    "nothing": lambda want: [],
    "an end": lambda want: [of(End(want.place))],
    "a problem as long as a book": lambda want: [[struct.pack("B", 0x91) + b"\x14", *[b"x" * (1 << 16)] * 20]],
    "bytes": lambda want: [[b"", os.urandom(100)], of(End(want.place))],
    "an empty message": lambda want: [[b""], [b"", b""], of(End(want.place))],
    "a message cut short": lambda want: [[b"", encode(End(want.place, "x" * 50))[:-9]], of(End(want.place))],
    "pieces that are missing": lambda want: [[b"\x91\x03", b"a"], [b"\x90"], [b"\xdd\xff\xff\xff\xff"], of(End(want.place))],
    "frames too many": lambda want: [[b"", encode(End(want.place)), b"x"], of(End(want.place))],
    "a consumer's message": lambda want: [[b"", encode(want)], of(End(want.place))],
    "what nests": lambda want: [[b"", b"\x91" * 60_000], of(End(want.place))],
    "another type in each place": lambda want: [
        *([b"", msgspec.msgpack.encode(each)] for each in (["block", "a", 1, 2, 3], ["end", None], ["block"], {"end": 1}, 7, None)), of(End(want.place)),
    ],
    "a block of wrong bytes": lambda want: [of(Block(want.place, want.hashes[0], bytes(16), bytes(BLOCK))), of(End(want.place))],
    "a block of no bytes": lambda want: [of(Block(want.place, want.hashes[0], b"", b"")), of(End(want.place))],
    **{f"a block that is whole, of {size} bytes": whole(size) for size in (0, 1, BLOCK, 1 << 15)},
    "a block of a megabyte": lambda want: [
        [b"\x91\x14", *[bytes(1 << 16)] * 20], [b"", encode(Block(want.place, want.hashes[0], bytes(16), bytes(60_000)))], of(End(want.place)),
    ],
    "blocks that nobody wants": lambda want: [*[of(Block(want.place, bytes(32), bytes(16), bytes(BLOCK)))] * 50, of(End(want.place))],
    "another's blocks": lambda want: [of(Block(want.place + 1, want.hashes[0], bytes(16), bytes(BLOCK))), of(End(want.place + 1)), of(End(want.place))],
    "ends without end": lambda want: [of(End(want.place))] * 100,
    "a problem": lambda want: [of(End(want.place, "\x1b[2J\n" * 5))],
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
def test_whoever_answers_at_the_port_changes_no_token(
    name: str, consumer: EngineCore, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """Here the port of a dead engine is somebody else's now."""
    before = open_files()
    with stranger(*STRANGERS[name]) as port:
        reset_prefix_cache(consumer)
        assert [run(consumer, LONG, port) for _ in range(2)] == [expected[tuple(LONG)]] * 2
    wait_until(lambda: open_files() <= before, "the connection stays open")
    assert_all_free(consumer)


@pytest.mark.parametrize("secret", ["another one", None])
def test_who_has_another_secret_is_asked_for_nothing(
    secret: str | None, consumer: EngineCore, expected: dict[tuple[int, ...], list[int]]
) -> None:
    heard: list[Any] = []
    before = open_files()
    with producer(secret, lambda want: heard.append(want) or []) as port:  # type: ignore[func-returns-value]
        reset_prefix_cache(consumer)
        assert run(consumer, LONG, port) == expected[tuple(LONG)]
    wait_until(lambda: open_files() <= before, "the connection stays open")
    assert not heard
    assert_all_free(consumer)


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_producer_answers_changes_no_token(
    name: str, consumer: EngineCore, expected: dict[tuple[int, ...], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """It knows the secret, and may be of another version, or broken. The next request is served, too."""
    before = open_files()
    with producer(SECRET, ANSWERS[name]) as port:
        for _ in range(2):
            reset_prefix_cache(consumer)
            assert run(consumer, LONG, port) == expected[tuple(LONG)]
        assert_all_free(consumer)
    wait_until(lambda: open_files() <= before, "the connection stays open")
    assert not [record.message for record in caplog.records if "\n" in record.message or "\x1b" in record.message]


def test_who_is_aborted_takes_no_block_from_another(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With n above 1 several answers name the same place: what one of them does not need is on its way for another."""
    monkeypatch.setenv("STAGES_NODE_SECRET", SECRET)
    send, is_asked, is_answered, goes_on = BlockServer._send, threading.Event(), threading.Event(), threading.Event()

    def wait_and_send(self: BlockServer, peer: bytes, message: Any) -> None:
        is_asked.set()
        assert is_answered.wait(PATIENCE)
        send(self, peer, message)

    monkeypatch.setattr(BlockServer, "_send", wait_and_send)
    pair = Pair(model)
    [letters] = [hook.connector._fetcher._mail for hook in pair.consumer.scheduler.hooks if hasattr(hook, "connector")]
    try:
        name = pair.add(LONG, params_of("greedy"))
        pair.run(is_asked.is_set)
        letters.put(goes_on.wait)  # its thread hears of the twin when it has ended
        params = pair.consumer.scheduler.requests[name].sampling_params
        pair.consumer.add_request(EngineCoreRequest("twin", LONG, params))
        pair.consumer.abort_requests(["twin"])
        letters.put(is_answered.set)
        goes_on.set()
        pair.run(lambda: name in pair.ended)
        assert pair.cached[name] == 76
        pair.assert_all_free()
    finally:
        goes_on.set()
        is_answered.set()
        pair.close()


# Consumers


def place_of(answer: list[bytes]) -> int:
    """Of which place an End is."""
    [frame] = answer
    return int(msgspec.msgpack.decode(frame)[1])


QUESTIONS: dict[str, list[list[bytes]]] = {
    "bytes": [[b"", os.urandom(100)], [os.urandom(10), os.urandom(10)]],
    "nothing": [[b""], [b"", b""]],
    "a message cut short": [[b"", encode(Want("x" * 50, 1, [bytes(32)], "r"))[:-9]]],
    "pieces that are missing": [[b"\x91\x03", b"a"], [b"\x90"], [b"\xdd\xff\xff\xff\xff"]],
    "a producer's message": [[b"", encode(End(1))]],
    "what nests": [[b"", b"\x91" * 60_000]],
    "another type in each place": [
        [b"", msgspec.msgpack.encode(each)] for each in (["want", 1, 2, 3, 4], ["want", "a", "b", [1], "r"], ["done", "a"], ["done"], {"want": 1}, 7, None)
    ],
    "a place far away": [[b"", msgspec.msgpack.encode(["done", place])] for place in (-1, 1 << 63, -(1 << 63))],
    "hashes without end": [[b"", encode(Want("x", 1, [bytes(32)] * 1500, "r"))]],
    "another model": [[b"", encode(Want("x" * 5000, 1, [], "r"))]],
    "a text as long as a book": [[b"\x91\x14", *[b"x" * (1 << 16)] * 20]],
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_whatever_a_consumer_says_a_producer_goes_on(name: str, giving: EngineCore) -> None:
    """It knows the secret, and may be of another version, or broken."""
    context, port = zmq.Context(), LISTENING[giving.config.kv_transfer_config.engine_id]
    link = Connection(context, zmq.DEALER, f"tcp://127.0.0.1:{port}", NodeSecret(SECRET.encode()))
    try:
        for frames in QUESTIONS[name]:
            zmq.Socket.send_multipart(link.socket, frames)
        link.send(encode(Want("", 99, [], "r")))
        while link.socket.poll(PATIENCE * 1000) and place_of(link.socket.recv_multipart()) != 99:
            pass
        add(giving, LONG, None)
        assert len(steps(giving)) == 4
        assert_all_free(giving)
    finally:
        link.close()
        context.term()


@pytest.fixture(scope="module")
def giving(model: str) -> Iterator[EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGES_NODE_SECRET", SECRET)
        core = core_of(model, "kv_producer")
    yield core
    core.shutdown()
