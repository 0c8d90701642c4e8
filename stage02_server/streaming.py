"""What the handlers return, as HTTP: JSON, or server-sent events until the client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stage02_server.disconnects import ClientGoneError, run_until_disconnect

Answer = BaseModel | AsyncGenerator[bytes, None]  # whole, or its events


class EventStreamResponse(StreamingResponse):
    """Server-sent events, until the client leaves. Its generator is closed then and there, so that the engine stops at
    once and not when the garbage collector comes by."""

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
    if isinstance(result, BaseModel):
        return Response(result.model_dump_json(), media_type="application/json")
    # Proxies such as nginx collect an answer before they pass it on, unless they are told not to.
    return EventStreamResponse(result, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


async def answer_of(work: Coroutine[Any, Any, Answer]) -> Response:
    """The response to a request whose client may leave before it is answered."""
    try:
        return answer(await work)
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it; nginx's number for this case in the access log
