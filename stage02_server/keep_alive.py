"""`--sse-keep-alive-interval`: a stream that says something while the model says nothing (vllm/entrypoints/openai/api_server.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

COMMENT = b": keep-alive\n\n"  # clients of server-sent events pass over lines that begin with a colon


async def with_keep_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """The same events, and a comment whenever none has come for that long: proxies end connections on which nothing is said.
    Closes `events` at the end."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait([waiting], timeout=seconds)
            if not done:
                yield COMMENT
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield event
    finally:
        if waiting is not None and not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await events.aclose()


def kept_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """`with_keep_alive`, or with 0 seconds the events as they are."""
    return with_keep_alive(events, seconds) if seconds else events
