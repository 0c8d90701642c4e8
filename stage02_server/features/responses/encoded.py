"""Responses and conversations as JSON in bytes: they take a tenth of the memory of their objects, and their size is exact.

What a response repeats of its request never changes, and may be megabytes of tools. It is encoded once; each event and each GET puts what
has changed since between the pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json

from stage02_server.features.responses.protocol import InputItem
from stage02_server.features.responses.protocol_output import ResponseProgress, ResponsesResponse
from stage03_engine.plugins import loaded

ITEMS = TypeAdapter(list[InputItem])
ITEMS_AT_ONCE = 256  # nothing else runs while so many are read or written
LINE_ENDS = {"\u0085": rb"\u0085", "\u2028": rb"\u2028", "\u2029": rb"\u2029"}
"""Some clients take these characters for the end of an event's line. JSON needs none of them as such."""


def _at_once(value: Any) -> Iterator[bytes]:
    yield to_json(value, inf_nan_mode="null")


# A long list of log-probabilities in pieces, between which others have a turn.
_PIECES: tuple[Callable[[Any], Iterable[bytes]], ...] = (
    *loaded("server", "json_pieces"),
    _at_once,
)


def to_bytes(value: Any) -> bytes:
    """Any part of an answer as JSON, on one line."""
    written = (
        b"".join(_PIECES[0](value)) if isinstance(value, BaseModel | list) else to_json(value, inf_nan_mode="null")
    )
    for character, escape in LINE_ENDS.items():
        written = written.replace(character.encode(), escape)
    return written


def object_of(members: Mapping[str, bytes]) -> bytes:
    """A JSON object whose members are JSON already."""
    return b"{%b}" % b",".join(to_json(name) + b":" + value for name, value in members.items())


class EncodedResponse:
    """A response without its progress: JSON of every field that ResponseProgress does not have."""

    def __init__(self, response: ResponsesResponse) -> None:
        self.members = {
            name: b"" if name in ResponseProgress.model_fields else to_bytes(getattr(response, name))
            for name in ResponsesResponse.model_fields
        }

    def whole(self, progress: ResponseProgress) -> bytes:
        """The response as a client gets it now."""
        changed = {name: to_bytes(getattr(progress, name)) for name in ResponseProgress.model_fields}
        return object_of(self.members | changed)


def encoded_items(items: list[InputItem]) -> list[bytes]:
    """A part of a conversation."""
    parts = range(0, len(items), ITEMS_AT_ONCE)
    return [ITEMS.dump_json(items[start : start + ITEMS_AT_ONCE], exclude_none=True) for start in parts]


def decoded_items(encoded: list[bytes]) -> list[InputItem]:
    """The same as objects. Takes long for long ones: 10 ms per MB."""
    return [item for part in encoded for item in ITEMS.validate_json(part)]


def memory_of(value: Any) -> int:
    """Bytes of memory of this value and of all that it holds, whatever its fields are. What two of them share counts once; functions,
    tasks and the like count as nothing."""
    seen: set[int] = set()
    waiting, total = [value], 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, BaseModel):
            waiting += [value.__dict__, value.__pydantic_extra__, value.__pydantic_fields_set__]
        elif is_dataclass(value):
            waiting += [getattr(value, each.name) for each in fields(value)]
        elif isinstance(value, msgspec.Struct):
            waiting += [getattr(value, name) for name in value.__struct_fields__]
        elif isinstance(value, EncodedResponse):
            waiting.append(value.members)
    return total
