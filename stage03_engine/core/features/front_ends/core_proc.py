"""An engine process with several front ends: each API server has its own sockets, and gets the outputs of its own requests.

A front end may end at any moment, even by kill -9, and another process may take its place. What the engine still has for the old one never
reaches the new one: that has an output socket with another name, which it tells when it joins, and until then nobody is there.

Source: vllm/v1/engine/core.py (EngineCoreProc with several input and output addresses, EngineCoreRequest.client_index). Here no message
names its front end. On the way in the socket tells it; for the way out this process remembers whose request each one is.
"""

from __future__ import annotations

import threading

import zmq

from stage03_engine import messages
from stage03_engine.core.engine_core_proc import EngineCoreProc
from stage03_engine.core.features.front_ends.deliveries import NOBODY, Aborted, Deliveries, Joined, Left, Requests, To
from stage03_engine.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineInit,
    UtilityRequest,
    UtilityResult,
)

JOIN = "join_front_end"
"""The first call of a front end, with the address of its output socket."""
WATCH, UNWATCH = "watch_scheduler", "unwatch_scheduler"


class SharedEngineCoreProc(EngineCoreProc):
    """The engine core behind two sockets per front end: the input address ends in the front end's number.

    A front end with requests in the engine gets a message after each step, even if the step has no output for it, as a sign of life.
    When the front end's process ends, its requests are aborted.
    """

    def __init__(self, init: EngineInit, identity: bytes, engine_index: int) -> None:
        self._num_front_ends = init.config.front_ends.num_front_ends
        self._requests = Requests()
        self._present: set[int] = set()  # front ends that have joined, and have not ended; the input thread's own
        super().__init__(init, identity, engine_index)

    def _process_input_socket(self, address: str, identity: bytes, connected: threading.Event) -> None:
        """Input thread: wait for messages from all front ends, and for the end of any.

        Invariant: the end of a front end is handled before a message of its successor. It is noticed before the successor can connect, so
        whenever such a message is there, the end is there too: the inputs are polled first, and the ends are handled first.
        """
        poller = zmq.Poller()
        inputs: dict[zmq.Socket, int] = {}
        monitors: dict[zmq.Socket, zmq.Socket] = {}  # -> the input that it watches
        for index in range(self._num_front_ends):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.connect(f"{address}_{index}")
            socket.send(b"")  # a ROUTER can only address peers from which it has heard
            inputs[socket], monitors[monitor] = index, socket
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
        connected.set()
        try:
            while True:
                ready = [socket for socket, _ in poller.poll()]
                for monitor in (each for each in ready if each in monitors):
                    monitor.recv_multipart()
                    self._leave(inputs[monitors[monitor]])
                    monitors[monitor].send(b"")  # for the next one at this address: ZMQ connects again by itself
                for socket in (each for each in ready if each in inputs):
                    self._take(inputs[socket], socket.recv_multipart())
        except zmq.ContextTerminated:
            for socket in (*monitors, *inputs):
                socket.close(linger=0)

    def _take(self, front_end: int, frames: list[bytes]) -> None:
        """Note which front end sent the message, before the busy loop can answer it."""
        if (received := self._decode(frames)) is None:
            return
        request_type, message = received
        if isinstance(message, UtilityRequest) and message.method == JOIN:
            return self._join(front_end, message)
        if front_end not in self._present:
            return  # it has ended since it sent this
        if isinstance(message, EngineCoreRequest):
            with self._requests.lock:
                owner = self._requests.owners.setdefault(message.request_id, front_end)
            if owner != front_end:  # a refusal from the busy loop would go to the owner, and end its request
                self._refuse(front_end, message.request_id)
                return
        elif isinstance(message, UtilityRequest):  # each front end numbers its calls from 0: make them unique
            message.call_id = message.call_id * self._num_front_ends + front_end
        self.input_queue.put((request_type, message))

    def _refuse(self, front_end: int, request_id: str) -> None:
        self._deliver(To(front_end, messages.refusal(request_id, ValueError(f"request id {request_id} is in use"))))

    def _deliver(self, order: To | Joined | Left | Aborted) -> None:
        """Queue it for the output thread, behind all outputs that were made before."""
        self.output_queue.put(order)  # type: ignore[arg-type]

    def _join(self, front_end: int, call: UtilityRequest) -> None:
        """A front end says where it reads outputs. It hears there that it has joined."""
        [address] = call.args
        self._present.add(front_end)
        self._deliver(Joined(front_end, address))
        self._deliver(To(front_end, EngineCoreOutputs(utility_result=UtilityResult(call.call_id, True))))

    def _leave(self, front_end: int) -> None:
        """A front end's process has ended: abort its requests."""
        self._present.discard(front_end)
        self._deliver(Left(front_end))
        with self._requests.lock:
            owners = self._requests.owners
            orphans = [request_id for request_id, owner in owners.items() if owner == front_end]
            # Until the abort is handled the ids stay taken, and outputs are dropped.
            owners.update(dict.fromkeys(orphans, NOBODY))
        self.input_queue.put((EngineCoreRequestType.ABORT, AbortRequests(orphans)))
        # Also if it does not watch yet: the call may be waiting in the queue. No front end has a call of this number, which is below 0.
        self.input_queue.put((EngineCoreRequestType.UTILITY, UtilityRequest(front_end - self._num_front_ends, UNWATCH)))

    def _handle(self, request_type: EngineCoreRequestType | None, message: object) -> None:
        if isinstance(message, UtilityRequest) and message.method in (WATCH, UNWATCH):
            if not self._watch(message.call_id % self._num_front_ends, message.method == WATCH):
                answer = UtilityResult(message.call_id, True)
                return self.output_queue.put(EngineCoreOutputs(utility_result=answer))
        elif isinstance(message, AbortRequests):  # an id is free again behind the last output of who had it
            self._deliver(Aborted(message.request_ids))
        super()._handle(request_type, message)

    def _watch(self, front_end: int, watches: bool) -> bool:
        """Note which front ends watch the scheduler. False if one stops and others still watch: then the scheduler goes on."""
        with self._requests.lock:
            watchers = self._requests.watchers
            (watchers.add if watches else watchers.discard)(front_end)
            return watches or not watchers

    def _process_output_socket(self, address: str) -> None:
        """Output thread: send each front end its part of the outputs. Bytes instead of outputs are the death notice and end the thread."""
        deliveries = Deliveries(self._context, self._num_front_ends, self._send, self._requests)
        while not isinstance(outputs := self.output_queue.get(), bytes):
            deliveries.handle(outputs)
        deliveries.end(outputs)
