"""The sockets between an executor and its workers: whole messages in order, and nobody waits for somebody who waits for him."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from stage03_engine.core.features.distributed.worker_links import PipeToExecutor, Stream, WorkerPipes, framed
from stage03_engine.core.features.distributed.worker_messages import CALL, FAILED, STEP

FOREVER_MS = 300_000


@pytest.fixture
def pipes() -> Iterator[WorkerPipes]:
    links = WorkerPipes()
    yield links
    links.close()


def worker(pipes: WorkerPipes) -> PipeToExecutor:
    return PipeToExecutor(pipes.add().detach())


MESSAGES = st.lists(st.tuples(st.sampled_from([STEP, CALL, FAILED]), st.binary(max_size=300), st.binary(max_size=30)))


class Pieces:
    """A socket that gives what was written in pieces of these sizes."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes = data, sizes

    def recv(self, most: int) -> bytes:
        size = self.sizes.pop() if self.sizes else most
        piece, self.data = self.data[:size], self.data[size:]
        return piece


@given(MESSAGES, st.lists(st.integers(1, 400)))
def test_messages_arrive_whole_however_they_are_cut(
    messages: list[tuple[bytes, bytes, bytes]], sizes: list[int]
) -> None:
    stream = Stream(Pieces(b"".join(framed(*message) for message in messages), sizes))  # type: ignore[arg-type]
    found = []
    while (more := stream.read()) is not None:
        found += more
    assert found == messages


def test_each_worker_gets_its_own_and_answers_are_told_apart(pipes: WorkerPipes) -> None:
    workers = [worker(pipes) for _ in range(2)]
    for rank in (1, 0, 1):
        pipes.send(rank, (STEP, b"for %d" % rank, b"7:1"))
    assert [workers[1].receive() for _ in range(2)] == [(STEP, b"for 1", b"7:1")] * 2
    assert workers[0].receive() == (STEP, b"for 0", b"7:1") and not workers[0].poll(0)
    workers[1].send(CALL, b"")
    assert pipes.receive(FOREVER_MS) == (1, (CALL, b"", b""))
    assert pipes.receive(0) is None
    for each in workers:
        each.close()


def test_large_messages_cross_each_other(pipes: WorkerPipes) -> None:
    """The worker writes before it reads, and neither message fits into the system's buffers."""
    one, large = worker(pipes), b"x" * 5_000_000
    found = []

    def work() -> None:
        one.send(STEP, large)
        found.append(one.receive())

    thread = threading.Thread(target=work)
    thread.start()
    pipes.send(0, (CALL, large[::2], b""))
    assert pipes.receive(FOREVER_MS) == (0, (STEP, large, b""))
    thread.join()
    assert found == [(CALL, large[::2], b"")]
    one.close()


def test_a_large_message_comes_whole(pipes: WorkerPipes) -> None:
    """It is read in many pieces, of which none is an answer."""
    one, large = worker(pipes), b"x" * 5_000_000
    thread = threading.Thread(target=one.send, args=(STEP, large))
    thread.start()
    assert pipes.receive(FOREVER_MS) == (0, (STEP, large, b""))
    thread.join()
    one.close()


def test_a_worker_that_is_gone(pipes: WorkerPipes) -> None:
    """Its last words arrive; then there is silence, not an endless answer."""
    one, other = worker(pipes), worker(pipes)
    one.send(FAILED, b"why")
    one.close()
    assert pipes.receive(FOREVER_MS) == (0, (FAILED, b"why", b""))
    assert pipes.receive(0) is None and pipes.receive(0) is None
    with pytest.raises(OSError):
        pipes.send(0, (STEP, b"", b""))
    other.send(CALL, b"here")
    assert pipes.receive(FOREVER_MS) == (1, (CALL, b"here", b""))
    other.close()
