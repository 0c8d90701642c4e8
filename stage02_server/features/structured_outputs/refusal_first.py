"""Answers that the engine may still refuse once it has compiled what the client wrote: the HTTP status waits for their first
piece.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Receive

from stage02_server.protocol_types import AnswerHook
from stage02_server.streaming import run_until_disconnect

T = TypeVar("T")


class RefusalFirst(AnswerHook):
    """A stream of answers begins when the first one is there."""

    async def begin(self, outputs: AsyncGenerator[T, None], receive: Receive) -> AsyncGenerator[T, None]:
        """Raises what the engine raises, and ClientGoneError."""
        return await run_until_disconnect(receive, _after_first(outputs))


async def _after_first(flow: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same flow, once its first item is there. Raises what the flow raises instead of one."""
    try:
        first = await anext(flow)
    except BaseException:
        await flow.aclose()
        raise

    async def go_on() -> AsyncGenerator[T, None]:
        async with aclosing(flow):
            yield first
            async for item in flow:
                yield item

    return go_on()
