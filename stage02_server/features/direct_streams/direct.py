"""The short way of a streamed token: from the engine's outputs straight to the connection (vLLM always takes the long way).

On the long way each token wakes the task of its request, passes three generators, Starlette's response and a handful of layers, and all
of them hand on what they get. With hundreds of streams the processor's caches hold none of that from one token of a stream to the
next. So, while the task waits for an output and the client has read all before it, the chunk is written where the output appears.

Everything else takes the long way: the first chunk, the last one, errors, what a client is too slow for, chunks that features change, and
all chunks where a layer looks at them or the trace is on.
"""

from __future__ import annotations

from asyncio import Transport
from contextlib import aclosing

from starlette.types import Scope

from stage02_server.middleware import CONNECTION
from stage02_server.serving_engine import AnswerMaker, OpenAIServing, Outputs
from stage03_engine.frontend.output_processor import OutputQueue, RequestOutputCollector, RequestState
from stage03_engine.outputs import RequestOutput
from stagetrace import trace

WATCHED = ("middleware", "sse_keep_alive_interval")  # flags of layers that see each chunk


class DirectStream:
    """Stands in front of the queue of one request.

    Invariant: a chunk is written here only while the request's task waits for an output (`_waits`), which it does when all before have
    been handed over: so chunks keep their order.
    """

    def __init__(self, maker: AnswerMaker, transport: Transport, states: dict[str, RequestState]) -> None:
        self._maker, self._transport, self._states = maker, transport, states
        self._queue: OutputQueue | None = None  # of the long way
        self._waits = False

    async def read(self, outputs: Outputs) -> Outputs:
        """The outputs that take the long way."""
        async with aclosing(outputs):
            async for prompt, output in outputs:
                yield prompt, output
                if self._queue is None:
                    self._step_in_front()
                self._waits = True

    def _step_in_front(self) -> None:
        """The first chunk is sent, so the answer's header is too."""
        state = self._states.get(self._maker.requests.engine_requests[0].request_id)
        if state is not None and type(state.queue) is RequestOutputCollector:
            self._queue, state.queue = state.queue, self

    def put(self, output: RequestOutput | Exception) -> None:
        """Write the chunk of an output, or let it take the long way. Never blocks."""
        transport = self._transport
        if (
            isinstance(output, Exception) or output.finished or not self._waits or trace.on
            or transport.get_write_buffer_size() or transport.is_closing()
        ):  # fmt: skip
            self._go_the_long_way(output)
            return
        self._maker.requests.received(0, output)
        try:
            events = b"".join(self._maker.chunks(0, [output]))
        except Exception as error:  # a parser's: it ends this stream, not the engine's front end
            self._go_the_long_way(error)
            return
        if events:  # as chunks of HTTP/1.1 are written
            transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    def _go_the_long_way(self, output: RequestOutput | Exception) -> None:
        self._waits = False  # until the task has handed it over
        assert self._queue is not None
        self._queue.put(output)


def direct(serving: OpenAIServing, maker: AnswerMaker, outputs: Outputs, scope: Scope) -> Outputs:
    """The same outputs without those that take the short way, if this stream may take it."""
    transport = scope.get("extensions", {}).get(CONNECTION, {}).get("transport")
    one = len(maker.requests.engine_requests) == 1 and maker.requests.n == 1
    watched = any(getattr(serving.args, flag, None) for flag in WATCHED) or not own_layers(scope)
    other_frames = scope.get("http_version") != "1.1"
    if transport is None or not one or maker.requests.hooks or watched or other_frames:
        return outputs
    return DirectStream(maker, transport, serving.engine_client.output_processor.request_states).read(outputs)


def own_layers(scope: Scope) -> bool:
    """False if a package has added a layer, of which nobody knows what it does with chunks."""
    return all(layer.cls.__module__.startswith("stage02_server.") for layer in scope["app"].user_middleware)
