"""`sleep`, `wake_up` and `is_sleeping` of LLM and AsyncLLM (vllm/entrypoints/llm.py, vllm/v1/engine/async_llm.py). No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.llm import LLM

AWAKE = "The engine is awake: there is nothing to wake up."


_watchers: WeakKeyDictionary[AsyncLLM, Callable[[int], None]] = WeakKeyDictionary()


def watch(engine: AsyncLLM, show: Callable[[int], None]) -> None:
    """From now on `show` is called with the level of sleep whenever this process has changed it; 0 is awake."""
    _watchers[engine] = show


async def _tell(engine: AsyncLLM) -> None:
    if (show := _watchers.get(engine)) is not None:
        show(await engine.call("sleep_level"))


def _list_of(tags: Sequence[str] | None) -> list[str]:
    """One tag, or several: a string is not a list of its letters."""
    return [tags] if isinstance(tags, str) else list(tags or ())


def sleep(llm: LLM, level: int = 1) -> None:
    """Give the memory of the KV cache back, and with level 2 that of the weights too. Raises InvalidRequestError while there are requests."""
    llm.call("sleep", level)


def wake_up(llm: LLM, tags: Sequence[str] | None = None) -> None:
    """Take the memory again: `weights`, `kv_cache`, or both. Raises InvalidRequestError if the engine does not sleep."""
    if not is_sleeping(llm):
        raise InvalidRequestError(AWAKE)
    llm.call("wake_up", _list_of(tags))


def is_sleeping(llm: LLM) -> bool:
    """Is a part of its memory away? Requests are refused then."""
    return not llm.call("is_awake")


async def sleep_async(engine: AsyncLLM, level: int = 1) -> None:
    """As `LLM.sleep`, for all engines or none. Raises EngineDeadError besides."""
    slept = await is_sleeping_async(engine)
    try:
        await engine.call("sleep", level)
    except InvalidRequestError:
        if slept:
            raise
        # One of several engines has requests: the others are not to sleep alone.
        with contextlib.suppress(InvalidRequestError):
            await engine.call("wake_up", [])
        raise
    await _tell(engine)


async def wake_up_async(engine: AsyncLLM, tags: Sequence[str] | None = None) -> None:
    """As `LLM.wake_up`, for all engines. Raises EngineDeadError besides."""
    if not await is_sleeping_async(engine):
        raise InvalidRequestError(AWAKE)
    await engine.call("wake_up", _list_of(tags))
    await _tell(engine)


async def is_sleeping_async(engine: AsyncLLM) -> bool:
    """Does one of the engines sleep?"""
    return not await engine.call("is_awake")


def follow(engine: AsyncLLM) -> None:
    """From now on an engine that is started again, or added, while the others sleep falls asleep before it gets requests; its weights are kept."""
    client: Any = engine.engine_core

    async def prepare(newcomer: Any) -> None:
        if not await client.call("is_awake"):
            with contextlib.suppress(InvalidRequestError):  # another front end was first, and has sent it requests
                await newcomer.call("sleep", 1)

    preparing = getattr(client, "preparing", None)
    if preparing is not None:  # several engines
        preparing.append(prepare)
