"""Requests of several prompts: their outputs as one flow (vllm/utils, merge_async_iterators)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from stage02_server.serving_engine import Outputs
from stage03_engine.outputs import RequestOutput

AT_ONCE = 4  # prompts of one request; then everybody else has a turn on the event loop


async def merge_async_iterators(iterators: list[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """(index of the iterator, its next output), as soon as an iterator has one. Closes all of them at the end.

    Reads only one output ahead per iterator: while a slow client holds this up, the collectors merge outputs.
    """
    waiting: dict[asyncio.Future[RequestOutput], int] = {}
    done: asyncio.Queue[asyncio.Future[RequestOutput]] = asyncio.Queue()

    async def read(index: int) -> None:
        waiting[future := asyncio.ensure_future(anext(iterators[index]))] = index
        future.add_done_callback(done.put_nowait)
        if index % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)

    try:
        for index in range(len(iterators)):
            await read(index)
        while waiting:
            index = waiting.pop(future := await done.get())
            try:
                output = future.result()
            except StopAsyncIteration:
                continue
            await read(index)
            yield index, output
    finally:
        for future, index in waiting.items():
            future.cancel()
            if index % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        await asyncio.gather(*waiting, return_exceptions=True)
        for iterator in iterators:
            await iterator.aclose()
