"""Long answers, made and written as JSON without holding up everybody else.

Python code in a thread gives way to the event loop every few milliseconds. pydantic writes an answer in one go and holds
the interpreter lock meanwhile, a second per 100 MB, whatever the thread: so it gets pieces of a millisecond each. The
JSON stays the same, byte by byte.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

from stage02_server.features.hardening.turns import TurnsByKey
from stage03_engine.outputs import RequestOutput

T = TypeVar("T")
THREADS = TurnsByKey(2, "answer")
LONG = 2048  # numbers and texts of an answer; 5 to 20 ms for those with log-probabilities
ANSWER = 16  # numbers that are as much work as the fixed part of an answer
CHARACTERS = 64  # of a text that are as much work as a number
PIECE = 4096  # numbers and texts that are written at a time
FEW = 16  # a list of no more items is taken apart: one of them may hold nearly everything
LONGEST_PAUSE = 5.0  # seconds in which no garbage is collected
OBJECT = 64  # numbers and texts that an object in a list may hold


class LongAnswers:
    """What streaming.py asks for; short answers are made and written at once."""

    @staticmethod
    async def made(make: Callable[[list[RequestOutput]], T], outputs: list[RequestOutput]) -> T:
        """What `make` makes of these outputs; a long answer as JSON."""
        if sum(map(_size, outputs)) <= LONG:
            return make(outputs)
        return await asyncio.get_running_loop().run_in_executor(THREADS, _made, make, outputs)

    @staticmethod
    async def written(answer: BaseModel) -> BaseModel:
        """A long answer as JSON; a short one as it is."""
        if isinstance(answer, Written) or is_short(answer):
            return answer
        return await asyncio.get_running_loop().run_in_executor(THREADS, Written, answer)


def _made(make: Callable[[list[RequestOutput]], Any], outputs: list[RequestOutput]) -> Any:
    with _COLLECTOR.paused():
        made = make(outputs)
        return Written(made) if isinstance(made, BaseModel) else made


class GarbageCollector:
    """Python's garbage collector looks through everything that is there, in one go: a million new objects hold up everybody for a
    tenth of a second, again and again while they are made. They are in no cycle, and go when the answer is written.

    Pauses that overlap without end would never let it free anything else: after LONGEST_PAUSE it works again, until all are over.
    """

    def __init__(self) -> None:
        self._lock, self._pauses, self._since = Lock(), 0, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It rests while the block runs, in any thread."""
        with self._lock:
            if not self._pauses:
                self._since = monotonic()
            self._pauses += 1
            self._switch()
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._switch()

    def _switch(self) -> None:
        if self._pauses and monotonic() - self._since < LONGEST_PAUSE:
            gc.disable()
        else:
            gc.enable()


_COLLECTOR = GarbageCollector()


def _size(output: RequestOutput) -> int:
    """How many numbers its answers show."""
    answers = output.outputs
    positions = chain(output.prompt_logprobs or (), *(answer.logprobs or () for answer in answers))
    logprobs = sum(len(position.token_ids) for position in positions if position)
    vectors = sum(map(len, (output.result or {}).get("pooled", ()))) // CHARACTERS
    return logprobs + vectors + sum(ANSWER + len(answer.token_ids) for answer in answers)


def is_short(answer: BaseModel) -> bool:
    """True if it holds at most LONG numbers and texts. Looks at no more of them."""
    left = LONG
    waiting: list[Collection[Any]] = [answer.__dict__.values()]
    while waiting:
        values = waiting.pop()
        left -= len(values)
        if left < 0:
            return False
        for value in values:
            if isinstance(value, str):
                left -= len(value) // CHARACTERS
            elif isinstance(value, list):
                waiting.append(value)
            elif isinstance(value, dict):
                waiting.append(value.values())
            elif isinstance(value, BaseModel):
                waiting.append(value.__dict__.values())
    return left >= 0


class Written(BaseModel):
    """A whole answer that is JSON already, and no object any more."""

    def __init__(self, answer: BaseModel) -> None:
        super().__init__()
        self._json = b"".join(json_pieces(answer))

    _json: bytes

    def model_dump_json(self, **how: Any) -> Any:
        """The JSON, in UTF-8."""
        return self._json


def json_pieces(value: Any, depth: int = 0) -> Iterator[bytes]:
    """`value.model_dump_json()`, in pieces."""
    if isinstance(value, BaseModel) and not _writes_itself(type(value)):
        yield from _object(value, depth)
    elif isinstance(value, list) and value:
        yield from _array(value, depth)
    else:
        yield _json(value)


def _writes_itself(kind: type[BaseModel]) -> bool:
    own = kind.__pydantic_decorators__
    return bool(own.model_serializers or own.field_serializers or own.computed_fields)


def _object(value: BaseModel, depth: int) -> Iterator[bytes]:
    fields = {name: getattr(value, name) for name in type(value).model_fields} | (value.model_extra or {})
    yield b"{"
    for number, (name, field) in enumerate(fields.items()):
        yield (b"," if number else b"") + _json(name) + b":"
        yield from json_pieces(field, depth + 1)
    yield b"}"


def _array(values: list[Any], depth: int) -> Iterator[bytes]:
    """The items one by one while they may be large: the choices of an answer, at depth 1, and whatever there are few of."""
    one_by_one = isinstance(values[0], BaseModel) and (depth == 1 or len(values) <= FEW)
    step = 1 if one_by_one else max(1, PIECE // _width(values[0]))
    yield b"["
    for start in range(0, len(values), step):
        if start:
            yield b","
        if one_by_one:
            yield from json_pieces(values[start], depth + 1)
        else:
            yield _json(values[start : start + step])[1:-1]
    yield b"]"


def _width(value: Any) -> int:
    """About how many numbers and texts an item of a list holds."""
    if isinstance(value, list | dict):
        return 1 + len(value)
    return 1 if value is None or isinstance(value, str | int | float) else OBJECT


def _json(value: Any) -> bytes:
    return to_json(value, by_alias=False, inf_nan_mode="null")
