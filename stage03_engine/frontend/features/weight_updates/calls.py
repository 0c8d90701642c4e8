"""`update_weights` of LLM and AsyncLLM (vllm/entrypoints/llm.py, update_weights).

Tensors cross as a safetensors file in a private folder, whose name is all that is sent: no pickle, and an engine that is started again finds the newest weights there.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.llm import LLM


@dataclass
class Newest:
    """The weights that an engine has been given last."""

    version: int
    folder: str
    remove: finalize  # the folder: when newer ones have come, or the engine has gone


_newest: WeakKeyDictionary[Any, Newest] = WeakKeyDictionary()
_going_on: set[asyncio.Future[int]] = set()  # asyncio itself holds its tasks weakly
Call = tuple[str, tuple[Any, ...]]


def _changing(owner: Any, weights: Iterable[tuple[str, Tensor]]) -> Generator[Call, None, int]:
    """The calls of an update, for callers with and without an event loop. Returns the version. Raises InvalidRequestError: then the old weights stay."""
    tensors = _gathered(weights)
    old, folder = _newest.get(owner), mkdtemp(prefix="stages-weights-")
    try:
        _write(tensors, folder)
        try:
            yield "prepare_weights", (folder,)
        except GeneratorExit:  # nobody asks for more
            raise
        except BaseException:  # the door may be closed already, or that of one of several engines
            yield "keep_weights", ()
            raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    version = 1 if old is None else old.version + 1
    remove = finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    # before the others have them: one that is started again meanwhile finds them too
    _newest[owner] = Newest(version, folder, remove)
    yield "update_weights", (folder, version)
    if old is not None:
        old.remove()
    return version


def _gathered(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of them. Raises InvalidRequestError for a dictionary, a name that comes twice, and what is no tensor with values."""
    import torch
    from torch import Tensor

    if isinstance(weights, Mapping):
        raise InvalidRequestError(
            "The weights are not replaced: give (name, tensor) pairs, such as state_dict().items()."
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in tensors or not isinstance(tensor, Tensor):
            raise InvalidRequestError(
                f"The weights are not replaced: {name} {'comes twice' if name in tensors else 'is no tensor'}."
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            raise InvalidRequestError(f"The weights are not replaced: {name} is not dense, or has no values.")
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return tensors


def _write(tensors: dict[str, Tensor], folder: str) -> None:
    """As a checkpoint has them. Raises InvalidRequestError."""
    from safetensors.torch import save_file

    try:
        save_file(tensors, Path(folder) / "model.safetensors")
    except KeyError as error:  # a number format that it does not know
        raise InvalidRequestError(f"The weights are not replaced: no checkpoint has {error.args[0]}.") from None


def update_weights(llm: LLM, weights: Iterable[tuple[str, Tensor]]) -> int:
    """Replace all weights of the model by (name, tensor) pairs, named and shaped as in its checkpoint. Returns their version: 1, 2, ... Raises InvalidRequestError
    for names, shapes and values that do not fit and while requests run; the old weights stay then, as they do if `weights` itself raises. Ctrl-C waits from there
    on until the engine has the new ones, or keeps the old; a second one does not."""
    change = _changing(llm, weights)
    call = next(change)
    with signals_wait():
        try:
            while True:
                try:
                    llm.call(call[0], *call[1])
                except BaseException as error:
                    call = change.throw(error)
                else:
                    call = next(change)
        except StopIteration as end:
            version: int = end.value
            return version


@contextmanager
def signals_wait() -> Iterator[None]:
    """What a signal's handler does, such as raising KeyboardInterrupt, it does after the block. A second signal of that kind does not wait: the first one may
    have been sent because the block does not end."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number not in noted:
            noted.append(number)
            return
        noted.remove(number)
        handlers[number](number, frame)

    in_main = threading.current_thread() is threading.main_thread()  # only there do handlers run
    found = {number: signal.getsignal(number) for number in signal.valid_signals()} if in_main else {}
    handlers = {int(number): handler for number, handler in found.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in noted:
            handlers[number](number, None)


async def update_weights_async(engine: AsyncLLM, weights: Iterable[tuple[str, Tensor]]) -> int:
    """As `LLM.update_weights`, in all engines or in none. `weights` are gone through in a thread. Who is cancelled meanwhile stops waiting: the update goes on to
    its end, or engines would stay closed, or differ. Raises EngineDeadError besides."""
    update = asyncio.ensure_future(_update(engine, weights))
    _going_on.add(update)
    update.add_done_callback(_ended)
    return await asyncio.shield(update)


def _ended(update: asyncio.Future[int]) -> None:
    """Perhaps nobody waits for it any more."""
    _going_on.discard(update)
    if not update.cancelled():
        update.exception()


async def _update(engine: AsyncLLM, weights: Iterable[tuple[str, Tensor]]) -> int:
    change = _changing(engine, weights)
    done = object()

    def step(error: Exception | None = None) -> Any:
        try:
            return next(change) if error is None else change.throw(error)
        except StopIteration as end:
            return done, end.value

    call = await asyncio.to_thread(step)
    while call[0] is not done:
        try:
            await engine.call(call[0], *call[1])
        except Exception as error:
            call = await asyncio.to_thread(step, error)
        else:
            call = await asyncio.to_thread(step)
    version: int = call[1]
    return version


def follow(engine: AsyncLLM) -> None:
    """From now on an engine that is started again, or added, gets the newest weights before it gets requests."""

    async def prepare(newcomer: Any) -> None:
        if (newest := _newest.get(engine)) is not None:
            await newcomer.call("prepare_weights", newest.folder)
            await newcomer.call("update_weights", newest.folder, newest.version)

    if (preparing := getattr(engine.engine_core, "preparing", None)) is not None:  # several engines
        preparing.append(prepare)
