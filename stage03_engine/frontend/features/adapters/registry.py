"""Which adapters there are: the one list of a front end (vllm/entrypoints/openai/models/serving.py, `OpenAIServingModels.lora_requests`).

An adapter has a name, by which requests choose it, and a number (vLLM: `lora_int_id`), by which the engine knows it. Numbers count up
and none is used twice: blocks of the KV cache that were made with an adapter are not found again with its successor of the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from stage03_engine.errors import BusyError, ConfigError, EngineDeadError, InvalidRequestError
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.params.lora import check_kinds
from stage03_engine.plugins import wanted
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
T = TypeVar("T")
Call = tuple[str, tuple[Any, ...]] | Callable[[], Any]
"""A method of the engine core, and its arguments; or what takes long and may run in a thread."""
MOST_NUMBER = (1 << 63) - 1
MOST_WAITING = 16  # changes that wait for their turn: the engine makes one at a time
MOST_CHARACTERS = 256  # of a name


@dataclass(frozen=True)
class KnownAdapter:
    """An adapter that requests may name."""

    name: str
    number: int
    folder: str
    digest: str  # of its files, which every engine must find the same

    @property
    def call(self) -> tuple[str, int, str, str]:
        """What loads it into an engine."""
        return self.name, self.number, self.folder, self.digest


class AdapterRegistry:
    """The adapters of one front end: those of `--lora-modules` under the numbers 1, 2, ..., in their order, and what was added since.

    Changes are generators of calls to the engine core (`loading`, `unloading`), so that callers with and without an event loop make them
    alike; `changing` and `run_blocking` run them. Invariant: what is in `known` is loaded in every engine.
    """

    def __init__(self, at_start: Iterable[KnownAdapter]) -> None:
        self.known = {adapter.name: adapter for adapter in at_start}
        self.most: int | None = None  # adapters at once; None: no limit
        self._next = len(self.known) + 1  # all numbers below it were used
        self._chosen: set[int] = set()  # numbers from there on that callers chose
        self._leases: Counter[int] = Counter()  # adapter -> series of requests that use it
        self._leaving: dict[int, KnownAdapter] = {}  # unloaded, but not yet from the engines: there is a lease
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def find(self, number: int) -> KnownAdapter | None:
        """The adapter with this number."""
        return next((each for each in self.known.values() if each.number == number), None)

    def loading(
        self, name: str, folder: str, number: int = 0, in_place: bool = False, root: str | None = None
    ) -> Generator[Call, Any, KnownAdapter]:
        """Load an adapter into all engines, or into none if one refuses it. `in_place` takes the place of one with this name, which the
        requests that run still use. `number` 0: the next one. Its files must lie below `root`, if given. Raises InvalidRequestError."""
        before = self.check(name, folder, number, in_place)
        adapter = KnownAdapter(name, number or self._next, folder, (yield partial(_digest, name, folder, root)))
        self._use(adapter.number)
        try:
            loaded = yield "add_lora", adapter.call
            if not loaded:
                raise InvalidRequestError(f"adapter {name}: the engine did not load it.", "lora_path")
        except Exception:  # one of several engines may have it
            yield from self._removal(adapter)
            raise
        self.known[name] = adapter
        if trace.on:
            trace.emit("lora.added", adapter=name, id=adapter.number, known=len(self.known))
        logger.info("Adapter %s (number %d) was loaded from %s.", name, adapter.number, folder)
        if before is not None:
            yield from self._removal(before)
        return adapter

    def check(self, name: str, folder: str, number: int = 0, in_place: bool = False) -> KnownAdapter | None:
        """Could it be loaded, as far as is known here? Returns the adapter whose place it would take. Raises InvalidRequestError."""
        check_kinds(lora_name=(name, str), lora_path=(folder, str), lora_int_id=(number, int))
        if not name or not folder:
            text = "Both 'lora_name' and 'lora_path' must be provided."
            raise InvalidRequestError(text, "lora_name" if folder else "lora_path")
        if len(name) > MOST_CHARACTERS or not name.isprintable() or "," in name:
            text = f"the name of an adapter has at most {MOST_CHARACTERS} characters, all printable, and no comma."
            raise InvalidRequestError(text, "lora_name")
        before = self.known.get(name)
        if before is not None and not in_place:
            text = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
            raise InvalidRequestError(text, "lora_name")
        if number > MOST_NUMBER:
            raise InvalidRequestError(f"lora_int_id must be at most {MOST_NUMBER}.", "lora_int_id")
        if number and (number < 0 or number in self._chosen or number < self._next):
            raise InvalidRequestError(
                f"lora_int_id: the number {number} was used already; each load needs a new one.", "lora_int_id"
            )
        if before is None and self.most is not None and len(self.known) >= self.most:
            text = f"There are {self.most} adapters, as many as --max-known-loras allows; unload one first."
            raise InvalidRequestError(text, "lora_name")
        return before

    def _use(self, number: int) -> None:
        """Never again."""
        self._chosen.add(number)
        while self._next in self._chosen:
            self._chosen.remove(self._next)
            self._next += 1

    def unloading(self, adapter: KnownAdapter) -> Generator[Call, Any, bool]:
        """From now on no request finds it; those that run with it end as if it were there. False if it is not known any more."""
        if self.known.get(adapter.name) != adapter:
            return False
        del self.known[adapter.name]
        if trace.on:
            trace.emit("lora.removed", adapter=adapter.name, id=adapter.number, known=len(self.known))
        logger.info("Adapter %s (number %d) was unloaded.", adapter.name, adapter.number)
        yield from self._removal(adapter)
        return True

    def _removal(self, adapter: KnownAdapter) -> Generator[Call, Any, None]:
        """From all engines, once nobody has a lease. An engine that is dead has forgotten it; that none has it is fine."""
        if self._leases[adapter.number]:
            self._leaving[adapter.number] = adapter
            return
        with contextlib.suppress(EngineDeadError, InvalidRequestError):
            yield "remove_lora", (adapter.number,)

    def lease(self, number: int) -> None:
        """Somebody will send requests with this adapter until `release`: it stays in the engines, even if it is unloaded."""
        self._leases[number] += 1

    def release(self, engine_core: Any, number: int) -> None:
        """The end of a lease; the last one takes an adapter that was unloaded out of the engines."""
        self._leases[number] -= 1
        if not self._leases[number]:
            del self._leases[number]
            if (adapter := self._leaving.pop(number, None)) is not None:
                self._begin(self._in_turn(engine_core, partial(self._removal, adapter)))

    async def changing(self, engine_core: Any, change: Callable[[], Generator[Call, Any, T]]) -> T:
        """Run a change, when those before it are done, to its end, even if the caller goes. `engine_core` is an AsyncEngineCoreClient, or
        what has its `call`. Raises BusyError if too many wait."""
        if len(self._tasks) >= MOST_WAITING:
            raise BusyError(
                f"{MOST_WAITING} adapters are being loaded or unloaded already; try again later.", "lora_name"
            )

        return await asyncio.shield(self._begin(self._in_turn(engine_core, change)))

    async def _in_turn(self, engine_core: Any, change: Callable[[], Generator[Call, Any, T]]) -> T:
        async with self._lock:
            return await _run(engine_core.call, asyncio.to_thread, change())

    def _begin(self, work: Any) -> asyncio.Task[Any]:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)
        return task

    def follow(self, engine_core: Any) -> None:
        """From now on an engine that is started again, or added, gets the adapters before it gets requests. `engine_core` is the client of
        all engines; that of a single one has nothing to follow."""
        preparing = getattr(engine_core, "preparing", None)
        if preparing is not None and not preparing:
            preparing.append(lambda client: self._restore(engine_core, client))

    async def _restore(self, engine_core: Any, client: Any) -> None:
        """Give one more engine the adapters that the others have. One that it refuses (its folder is gone, or its files have changed) is unloaded
        from all: no request may depend on the engine that it gets to."""
        async with self._lock:
            wanted_there = {each.number: each for each in (*self.known.values(), *self._leaving.values())}
            there = set(
                await client.call("list_loras") or ()
            )  # an engine of another machine starts with that of its settings
            for number in there - wanted_there.keys():
                await client.call("remove_lora", number)
            for number in sorted(wanted_there.keys() - there):
                try:
                    await client.call("add_lora", *wanted_there[number].call)
                except InvalidRequestError as error:
                    await self._refused(engine_core, wanted_there[number], error)

    async def _refused(self, engine_core: Any, adapter: KnownAdapter, error: InvalidRequestError) -> None:
        if trace.on:
            trace.emit("lora.refused", adapter=adapter.name, id=adapter.number, message=str(error))
        name = adapter.name
        logger.warning("An engine that was started again refuses adapter %s, which is unloaded: %s", name, error)
        await _run(engine_core.call, asyncio.to_thread, self.unloading(adapter))


def _digest(name: str, folder: str, root: str | None) -> str:
    try:
        found: str = wanted("engine", "digest_of_adapter", "what reads adapters")(folder, root)
        return found
    except ConfigError as error:
        raise InvalidRequestError(f"adapter {name}: {error}", "lora_path") from error


async def _run(
    call: Callable[..., Awaitable[Any]], in_thread: Callable[..., Awaitable[Any]], change: Generator[Call, Any, T]
) -> T:
    """Make the calls of a change."""
    answer, failed = None, None
    while True:
        try:
            step = change.send(answer) if failed is None else change.throw(failed)
        except StopIteration as end:
            return end.value
        answer, failed = None, None
        try:
            answer = await (in_thread(step) if callable(step) else call(step[0], *step[1]))
        except Exception as error:
            failed = error


def run_blocking(engine_core: Any, change: Generator[Call, Any, T]) -> T:
    """The same without an event loop: `engine_core` is an EngineCoreClient, whose calls return when they are done. So nothing ever waits."""

    async def now(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    try:
        _run(partial(now, engine_core.call), now, change).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


_registries: WeakKeyDictionary[InputProcessor, AdapterRegistry] = WeakKeyDictionary()


def registry_of(processor: InputProcessor) -> AdapterRegistry:
    """That of the front end which has this input processor: `LLM` and `AsyncLLM` have one each."""
    if processor not in _registries:
        lora = processor.vllm_config.lora_config
        at_start = lora.adapters() if lora.enable_lora else ()
        _registries[processor] = AdapterRegistry(
            KnownAdapter(each.name, each.number, each.folder, each.digest) for each in at_start
        )
    return _registries[processor]


def follow(engine: AsyncLLM) -> None:
    """From the start: an engine that dies is started again without the adapters of its settings."""
    registry_of(engine.input_processor).follow(engine.engine_core)
