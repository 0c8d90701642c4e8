"""Work that stops when its client leaves; answers as JSON or server-sent events (vllm/entrypoints/serve/utils/api_utils.py, with_cancellation).

Work that would block the event loop, and with it all other streams, runs in a fixed number of threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sized
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stage03_engine.plugins import find, loaded

T = TypeVar("T")
Output = TypeVar("Output")
LONG = 8192  # characters, or token ids, of one request take 1 to 3 ms to tokenize; a thread's round trip takes 0.04
PER_PROMPT = 32  # characters take as long as the fixed work per prompt, 10 µs
LONG_ANSWERS: tuple[Any, ...] = loaded("server", "long_answers")


class ClientGoneError(Exception):
    """The client closed its connection before the answer was ready; nobody will read one."""


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; returns once it has cleaned up.

    `receive` returns the client's messages. Raises ClientGoneError if the client left.
    """
    own = asyncio.current_task()
    assert own is not None
    working = asyncio.create_task(work, name=own.get_name())  # whose work it is, for debuggers
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def in_thread(threads: Executor | None, receive: Receive, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in the next of these threads to be free, or of asyncio's own.

    Raises what `work` raises, and ClientGoneError if the client left; work that has not begun is then dropped.
    """

    async def wait() -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    return await run_until_disconnect(receive, wait())


async def in_thread_if_long(prompts: Iterable[Sized], receive: Receive, work: Callable[[], T]) -> T:
    """The result of `work` on these texts, bytes and lists of token ids, without a thread if they are short in total.
    Raises as `in_thread` does."""
    if (size := sum(len(prompt) + PER_PROMPT for prompt in prompts)) <= LONG:
        return work()
    threads_for = find("server", "threads")  # small work does not wait for large
    return await in_thread(None if threads_for is None else threads_for(size), receive, work)


async def made(make: Callable[[list[Output]], T], outputs: list[Output]) -> T:
    """What `make` makes of these outputs; the feature for long answers makes many in a thread."""
    return await LONG_ANSWERS[0].made(make, outputs) if LONG_ANSWERS else make(outputs)


Answer = BaseModel | bytes | AsyncGenerator[bytes, None]  # whole, perhaps as JSON already, or its events


def server_sent_event(data: bytes | bytearray) -> bytes:
    """One event of a stream: a field `data`, and the empty line that ends it. `data` has no line break, as JSON never has."""
    return b"data: " + data + b"\n\n"


class EventStreamResponse(StreamingResponse):
    """Server-sent events, until the client leaves. Its generator is closed at once, so that the engine stops
    then and not at the next garbage collection."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self.stream_response(send))
        except ClientGoneError:
            pass

    async def stream_response(self, send: Send) -> None:
        events = self.body_iterator
        assert isinstance(events, AsyncGenerator)
        async with aclosing(events):
            await super().stream_response(send)


def answer(result: Answer) -> Response:
    """A handler's result as a response."""
    if isinstance(result, BaseModel | bytes):
        written = result if isinstance(result, bytes) else result.model_dump_json()
        return Response(written, media_type="application/json")
    # Proxies such as nginx buffer an answer unless a header forbids it.
    return EventStreamResponse(result, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


async def answer_of(work: Coroutine[Any, Any, Answer]) -> Response:
    """The response to a request whose client may leave before it is answered."""
    try:
        result = await work
        if LONG_ANSWERS and isinstance(result, BaseModel):
            result = await LONG_ANSWERS[0].written(result)
        return answer(result)
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it; in the access log it is nginx's number for this case
