"""What the output thread of an engine with several front ends does: to each the outputs of its own requests, to one the statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from stage03_engine.messages import ENGINE_CORE_DEAD, EngineCoreOutputs, SchedulerStats

COUNTED = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
"""What SchedulerStats counts from the start of the engine, besides `counts`."""
NOBODY = -1
"""The owner of a request whose front end has ended, until the request has ended too."""


@dataclass(frozen=True)
class To:
    """Outputs for one front end."""

    front_end: int
    outputs: EngineCoreOutputs


@dataclass(frozen=True)
class Joined:
    """A process is there for this front end, and reads at this address."""

    front_end: int
    address: str


@dataclass(frozen=True)
class Left:
    """The process of this front end has ended: whatever comes for it is dropped."""

    front_end: int


@dataclass(frozen=True)
class Aborted:
    """No more outputs come of these requests."""

    request_ids: list[str]


@dataclass
class Requests:
    """Whose is what. `lock` guards it: the main thread and the threads of the sockets share it."""

    owners: dict[str, int] = field(default_factory=dict)  # request -> its front end
    watchers: set[int] = field(default_factory=set)  # front ends with a live view
    lock: threading.Lock = field(default_factory=threading.Lock)


class Deliveries:
    """The output sockets of all front ends, of those that are there.

    The scheduler's statistics go to one of them, so that they are counted once: to the one with the lowest number, until it ends. Whoever gets
    them next is told what was counted since; the metrics of the process that has ended keep the rest.
    """

    def __init__(
        self, context: zmq.Context, num_front_ends: int, send: Callable[[zmq.Socket, EngineCoreOutputs], None],
        requests: Requests,
    ) -> None:  # fmt: skip
        self._context, self._num_front_ends, self._send, self._requests = context, num_front_ends, send, requests
        self._sockets: dict[int, zmq.Socket] = {}
        self._answered: set[int] = set()  # front ends to be told that their abort was handled
        self._counts_for: int | None = None  # the front end that gets the statistics
        self._counted = self._counted_before = SchedulerStats()  # what was last sent; the same when this one began

    def handle(self, order: EngineCoreOutputs | To | Joined | Left | Aborted) -> None:
        """Do what has come up in the queue."""
        match order:
            case Joined(front_end, address):
                self._close(front_end)
                self._sockets[front_end] = socket = self._context.socket(zmq.PUSH)
                socket.set_hwm(0)
                socket.connect(address)
            case Left(front_end):
                self._close(front_end)
            case Aborted(request_ids):
                with self._requests.lock:
                    gone = {self._requests.owners.pop(request_id, None) for request_id in request_ids}
                self._answered |= {owner for owner in gone if owner is not None}
            case To(front_end, outputs):
                self._send_to(front_end, outputs)
            case EngineCoreOutputs():
                with self._requests.lock:
                    parts = self._split(order, self._requests.owners)
                for front_end, part in parts.items():
                    self._send_to(front_end, part)

    def _close(self, front_end: int) -> None:
        if (socket := self._sockets.pop(front_end, None)) is not None:
            socket.close(linger=0)
        if self._counts_for == front_end:
            self._counts_for, self._counted_before = None, self._counted

    def _send_to(self, front_end: int, outputs: EngineCoreOutputs) -> None:
        if (socket := self._sockets.get(front_end)) is not None:
            self._send(socket, outputs)

    def _split(self, outputs: EngineCoreOutputs, owners: dict[str, int]) -> dict[int, EngineCoreOutputs]:
        """Each front end that is to hear of this step, and its part of the outputs. Those that have ended leave `owners`."""
        if (answer := outputs.utility_result) is not None:
            answer.call_id, front_end = divmod(answer.call_id, self._num_front_ends)
            return {front_end: outputs}
        if self._counts_for is None and self._sockets:
            self._counts_for = min(self._sockets)
        watching = self._requests.watchers if outputs.trace_events else set()
        to = {*owners.values(), *self._answered, *watching}
        if self._counts_for is not None:
            to.add(self._counts_for)
        parts = {one: EngineCoreOutputs(engine_index=outputs.engine_index, step=outputs.step) for one in to}
        self._answered.clear()
        for output in outputs.outputs:
            owner = owners.get(output.request_id)
            if output.finish_reason is not None:
                owners.pop(output.request_id, None)
            if owner is not None:  # else aborted meanwhile
                parts[owner].outputs.append(output)
        if self._counts_for is not None and outputs.scheduler_stats is not None:
            self._counted = outputs.scheduler_stats
            parts[self._counts_for].scheduler_stats = _since(self._counted_before, self._counted)
        for watcher in watching:
            parts[watcher].trace_events = outputs.trace_events
        return parts

    def end(self, death_notice: bytes) -> None:
        """Send the notice, if there is one, and close the sockets."""
        for socket in self._sockets.values():
            if death_notice:
                socket.send_multipart([ENGINE_CORE_DEAD, death_notice])
            socket.close(linger=1000)


def _since(before: SchedulerStats, now: SchedulerStats) -> SchedulerStats:
    """The state of now, with what was counted since."""
    counted = {name: getattr(now, name) - getattr(before, name) for name in COUNTED}
    counts = {name: number - before.counts.get(name, 0) for name, number in now.counts.items()}
    return msgspec.structs.replace(now, counts=counts, **counted)
