"""Which adapters there are: the one list of a front end (vllm/entrypoints/openai/models/serving.py, `OpenAIServingModels.lora_requests`).

An adapter has a name, by which requests choose it, and a number (vLLM: `lora_int_id`), by which the engine knows it. Numbers count up
and none is used twice: blocks of the KV cache that were made with an adapter are not found again with its successor of the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from stage03_engine.errors import BusyError, EngineDeadError, InvalidRequestError
from stage03_engine.frontend.input_processor import InputProcessor
from stagetrace import trace

logger = logging.getLogger(__name__)
T = TypeVar("T")
Call = tuple[str, tuple[Any, ...]]  # a method of the engine core, and its arguments
MOST_WAITING = 16  # changes that wait for their turn: the engine makes one at a time
MOST_CHARACTERS = 256  # of a name


@dataclass(frozen=True)
class KnownAdapter:
    """An adapter that requests may name."""

    name: str
    number: int
    folder: str


class AdapterRegistry:
    """The adapters of one front end: those of `--lora-modules` under the numbers 1, 2, ..., in their order, and what was added since.

    Changes are generators of calls to the engine core (`loading`, `unloading`), so that callers with and without an event loop make them
    alike; `changing` and `change` run them. Invariant: what is in `known` is loaded in every engine.
    """

    def __init__(self, at_start: dict[str, str]) -> None:
        self.known: dict[str, KnownAdapter] = {
            name: KnownAdapter(name, number, folder) for number, (name, folder) in enumerate(at_start.items(), start=1)
        }
        self.most: int | None = None  # adapters at once; None: no limit
        self._num_at_start = len(self.known)
        self._next = self._num_at_start + 1  # all numbers below it were used
        self._chosen: set[int] = set()  # numbers from there on that callers chose
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def find(self, number: int) -> KnownAdapter | None:
        """The adapter with this number."""
        return next((each for each in self.known.values() if each.number == number), None)

    def loading(
        self, name: str, folder: str, number: int = 0, in_place: bool = False
    ) -> Generator[Call, Any, KnownAdapter]:
        """Load an adapter into all engines, or into none if one refuses it. `in_place` takes the place of one with this name, which the
        requests that run still use. `number` 0: the next one. Raises InvalidRequestError."""
        before = self._check(name, folder, number, in_place)
        adapter = KnownAdapter(name, number or self._next_number(), folder)
        self._use(adapter.number)
        try:
            loaded = yield "add_lora", (adapter.name, adapter.number, adapter.folder)
            if not loaded:
                raise InvalidRequestError(f"adapter {name}: the engine did not load it.", "lora_path")
        except Exception:  # one of several engines may have it
            yield from _removal(adapter)
            raise
        self.known[name] = adapter
        if trace.on:
            trace.emit("lora.added", adapter=name, id=adapter.number, known=len(self.known))
        logger.info("Adapter %s (number %d) was loaded from %s.", name, adapter.number, folder)
        if before is not None:
            yield from _removal(before)
        return adapter

    def _check(self, name: str, folder: str, number: int, in_place: bool) -> KnownAdapter | None:
        """The adapter whose place the new one takes. Raises InvalidRequestError."""
        if not name or not folder:
            raise InvalidRequestError("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        if len(name) > MOST_CHARACTERS or not name.isprintable() or "," in name:
            text = f"the name of an adapter has at most {MOST_CHARACTERS} characters, all printable, and no comma."
            raise InvalidRequestError(text, "lora_name")
        before = self.known.get(name)
        if before is not None and not in_place:
            text = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
            raise InvalidRequestError(text, "lora_name")
        if number and (number < 0 or number in self._chosen or number < self._next):
            raise InvalidRequestError(
                f"lora_int_id: the number {number} was used already; each load needs a new one.", "lora_int_id"
            )
        if before is None and self.most is not None and len(self.known) >= self.most:
            text = f"There are {self.most} adapters, as many as --max-known-loras allows; unload one first."
            raise InvalidRequestError(text, "lora_name")
        return before

    def _next_number(self) -> int:
        return self._next

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
        yield from _removal(adapter)
        return True

    async def changing(self, engine_core: Any, change: Callable[[], Generator[Call, Any, T]]) -> T:
        """Run a change, when those before it are done, to its end, even if the caller goes. `engine_core` is an AsyncEngineCoreClient, or
        what has its `call`. Raises BusyError if too many wait."""
        if len(self._tasks) >= MOST_WAITING:
            raise BusyError(
                f"{MOST_WAITING} adapters are being loaded or unloaded already; try again later.", "lora_name"
            )

        async def in_turn() -> T:
            async with self._lock:
                return await _run(engine_core, change())

        self._tasks.add(task := asyncio.create_task(in_turn()))
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def follow(self, engine_core: Any) -> None:
        """From now on an engine that is started again, or added, gets the adapters before it gets requests. `engine_core` is the client of
        all engines; that of a single one has nothing to follow."""
        preparing = getattr(engine_core, "preparing", None)
        if preparing is not None and not preparing:
            preparing.append(lambda client: self._restore(engine_core, client))

    async def _restore(self, engine_core: Any, client: Any) -> None:
        """Load what was added since the start into one more engine. An adapter that it refuses (its folder is gone, or no longer fits) is unloaded
        from all: no request may depend on the engine that it gets to."""
        async with self._lock:
            for adapter in list(self.known.values()):
                if self._is_from_start(adapter):
                    continue
                try:
                    await client.call("add_lora", adapter.name, adapter.number, adapter.folder)
                except InvalidRequestError as error:
                    logger.warning(
                        "An engine that was started again refuses adapter %s, which is unloaded: %s",
                        adapter.name,
                        error,
                    )
                    await _run(engine_core, self.unloading(adapter))

    def _is_from_start(self, adapter: KnownAdapter) -> bool:
        """The engines themselves load these."""
        return adapter.number <= self._num_at_start


def _removal(adapter: KnownAdapter) -> Generator[Call, Any, None]:
    """From all engines. An engine that is dead has forgotten it; that none has it is fine."""
    with contextlib.suppress(EngineDeadError, InvalidRequestError):
        yield "remove_lora", (adapter.number,)


async def _run(engine_core: Any, change: Generator[Call, Any, T]) -> T:
    """Make the calls of a change, on an event loop."""
    answer, failed = None, None
    while True:
        try:
            method, args = change.send(answer) if failed is None else change.throw(failed)
        except StopIteration as end:
            return end.value
        answer, failed = None, None
        try:
            answer = await engine_core.call(method, *args)
        except Exception as error:
            failed = error


def run_blocking(engine_core: Any, change: Generator[Call, Any, T]) -> T:
    """The same without an event loop: `engine_core` is an EngineCoreClient."""
    answer, failed = None, None
    while True:
        try:
            method, args = change.send(answer) if failed is None else change.throw(failed)
        except StopIteration as end:
            return end.value
        answer, failed = None, None
        try:
            answer = engine_core.call(method, *args)
        except Exception as error:
            failed = error


_registries: WeakKeyDictionary[InputProcessor, AdapterRegistry] = WeakKeyDictionary()


def registry_of(processor: InputProcessor) -> AdapterRegistry:
    """That of the front end which has this input processor: `LLM` and `AsyncLLM` have one each."""
    if processor not in _registries:
        lora = processor.vllm_config.lora_config
        _registries[processor] = AdapterRegistry(lora.adapters() if lora.enable_lora else {})
    return _registries[processor]
