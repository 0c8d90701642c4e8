"""An engine process with several front ends: each API server has its own sockets, and gets the outputs of its own requests.

Source: vllm/v1/engine/core.py (EngineCoreProc with several input and output addresses, EngineCoreRequest.client_index). Here no message
names its front end. On the way in the socket tells it; for the way out this process remembers whose request each one is.
"""

from __future__ import annotations

import threading

import zmq

from stage03_engine import messages
from stage03_engine.core.engine_core_proc import EngineCoreProc
from stage03_engine.messages import (
    ENGINE_CORE_DEAD,
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineInit,
    UtilityRequest,
    UtilityResult,
)

FIRST = 0
"""The front end that gets the scheduler's statistics, so that they are counted once."""
WATCH, UNWATCH = "watch_scheduler", "unwatch_scheduler"


class SharedEngineCoreProc(EngineCoreProc):
    """The engine core behind two sockets per front end, whose addresses end in the front end's number.

    A front end with requests in the engine gets a message after each step, even if the step has no output for it, as a sign of life.
    When the front end's process ends, its requests are aborted. `_lock` guards what the main thread and the threads of the sockets share.
    """

    def __init__(self, init: EngineInit, identity: bytes, engine_index: int) -> None:
        self._num_front_ends = init.config.front_ends.num_front_ends
        self._lock = threading.Lock()
        self._owners: dict[str, int] = {}  # request -> its front end
        self._answered: set[int] = set()  # front ends to be told that their abort was handled
        self._watchers: set[int] = set()  # front ends with a live view
        self._gone: set[int] = set()
        super().__init__(init, identity, engine_index)

    def _process_input_socket(self, address: str, identity: bytes, connected: threading.Event) -> None:
        """Input thread: wait for messages from all front ends, and for the end of any."""
        poller = zmq.Poller()
        inputs: dict[zmq.Socket, int] = {}
        monitors: dict[zmq.Socket, int] = {}
        for index in range(self._num_front_ends):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.connect(f"{address}_{index}")
            socket.send(b"")  # a ROUTER can only address peers from which it has heard
            inputs[socket], monitors[monitor] = index, index
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
        connected.set()
        try:
            while True:
                for socket, _ in poller.poll():
                    frames = socket.recv_multipart()
                    if socket in inputs:
                        self._take(inputs[socket], frames)
                    else:
                        self._leave(monitors[socket])
        except zmq.ContextTerminated:
            for socket in (*monitors, *inputs):
                socket.close(linger=0)

    def _take(self, front_end: int, frames: list[bytes]) -> None:
        """Note which front end sent the message, before the busy loop can answer it."""
        if (received := self._decode(frames)) is None:
            return
        request_type, message = received
        if isinstance(message, EngineCoreRequest):
            with self._lock:
                owner = self._owners.setdefault(message.request_id, front_end)
            if owner != front_end:  # a refusal from the busy loop would go to the owner, and end its request
                self._refuse(front_end, message.request_id)
                return
        elif isinstance(message, UtilityRequest):  # each front end numbers its calls from 0: make them unique
            message.call_id = message.call_id * self._num_front_ends + front_end
        self.input_queue.put((request_type, message))

    def _refuse(self, front_end: int, request_id: str) -> None:
        refusal = messages.refusal(request_id, ValueError(f"request id {request_id} is in use"))
        self.output_queue.put((front_end, refusal))  # type: ignore[arg-type]

    def _leave(self, front_end: int) -> None:
        """A front end's process has ended: abort its requests."""
        with self._lock:
            self._gone.add(front_end)
            orphans = [request_id for request_id, owner in self._owners.items() if owner == front_end]
        self.input_queue.put((EngineCoreRequestType.ABORT, AbortRequests(orphans)))
        if front_end in self._watchers:
            self.input_queue.put((EngineCoreRequestType.UTILITY, UtilityRequest(front_end, UNWATCH)))

    def _handle(self, request_type: EngineCoreRequestType | None, message: object) -> None:
        if isinstance(message, UtilityRequest) and message.method in (WATCH, UNWATCH):
            if not self._watch(message.call_id % self._num_front_ends, message.method == WATCH):
                answer = UtilityResult(message.call_id, True)
                return self.output_queue.put(EngineCoreOutputs(utility_result=answer))
        elif isinstance(message, AbortRequests):
            with self._lock:
                owners = {self._owners.pop(request_id, None) for request_id in message.request_ids}
                self._answered |= {owner for owner in owners if owner is not None}
        super()._handle(request_type, message)

    def _watch(self, front_end: int, watches: bool) -> bool:
        """Note which front ends watch the scheduler. False if one stops and others still watch: then the scheduler goes on."""
        with self._lock:
            (self._watchers.add if watches else self._watchers.discard)(front_end)
            return watches or not self._watchers

    def _process_output_socket(self, address: str) -> None:
        """Output thread: send each front end its part of the outputs. Bytes instead of outputs are the death notice and end the thread."""
        sockets = []
        for index in range(self._num_front_ends):
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(f"{address}_{index}")
            sockets.append(socket)
        while not isinstance(outputs := self.output_queue.get(), bytes):
            parts = {outputs[0]: outputs[1]} if isinstance(outputs, tuple) else self._split(outputs)
            for index, part in parts.items():
                if index not in self._gone:
                    self._send(sockets[index], part)
        for socket in sockets:
            if outputs:
                socket.send_multipart([ENGINE_CORE_DEAD, outputs])
            socket.close(linger=1000)

    def _split(self, outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
        """Front end -> its part of the outputs."""
        if (answer := outputs.utility_result) is not None:
            answer.call_id, front_end = divmod(answer.call_id, self._num_front_ends)
            return {front_end: outputs}
        with self._lock:
            watchers = self._watchers if outputs.trace_events else set()
            to = {FIRST, *self._owners.values(), *self._answered, *watchers}
            parts = {one: EngineCoreOutputs(engine_index=outputs.engine_index, step=outputs.step) for one in to}
            self._answered.clear()
            for output in outputs.outputs:
                owner = self._owners.get(output.request_id)
                if output.finish_reason is not None:
                    self._owners.pop(output.request_id, None)
                if owner is not None:  # else aborted meanwhile
                    parts[owner].outputs.append(output)
        parts[FIRST].scheduler_stats = outputs.scheduler_stats
        for watcher in watchers:
            parts[watcher].trace_events = outputs.trace_events
        return parts
