"""What the player's page holds of a recording: each event once, as a row of numbers, and the tables that they point into."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.ids import root_of
from stagetrace.player.places import is_on_the_walk, place_of
from stagetrace.read.reader import Recording, Run
from stagetrace.vocabulary import VOCABULARY

MAX_EVENTS = 200_000
"""A page above this would take a browser many seconds to open: some 10,000 steps of ten requests."""

_GIVEN_ID = re.compile(r"(?:chat)?cmpl-([^#]{1,10})-[0-9a-f]{8}|([^#]{1,10})")
"""Roots of requests that came with X-Request-Id, and of those that did not come over HTTP: `cmpl-r0-b281c1bc` is called `r0` on the page."""


class _Table:
    """Values in the order in which they came, each once; an event says the place of its value."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def place(self, value: Any) -> int:
        return self.places.setdefault(value, len(self.places))


def page_data(recording: str | Path | Recording | Run) -> dict[str, Any]:
    """One recording for the page: title, tables, and `events` with the columns [microseconds since the start, process,
    kind, source, phase letter, values of the arguments, step, request, cause]. A kind is a name and the names of its arguments;
    `cause` is the place of another event; -1 = none.

    Raises FileNotFoundError if there is no recording, TraceError if it is empty or has more than MAX_EVENTS events.
    """
    title, events = _open(recording)
    kinds, processes, sources, requests, refs = _Table(), _Table(), _Table(), _Table(), _Table()
    rows: list[list[Any]] = []
    for event in events:
        if len(rows) == MAX_EVENTS:
            raise TraceError(
                f"{title} has more than {MAX_EVENTS} events, too many for one page: record less "
                "(--trace-phases, --trace-names, --trace-requests of serve), or export it for Perfetto"
            )
        refs.place(event.ref)
        rows.append(
            [
                event.ts, processes.place((event.pid, event.proc)), kinds.place((event.name, *event.args)),
                sources.place(event.src), "iBE".find(event.ph), list(event.args.values()),
                -1 if event.step is None else event.step, -1 if event.req is None else requests.place(event.req), event.cause,
            ]
        )  # fmt: skip
    if not rows:
        raise TraceError(f"{title} holds no events")
    start = min(row[0] for row in rows)
    for row in rows:
        row[0], row[8] = (row[0] - start) // 1000, refs.places.get(row[8], -1)
    return {
        "title": title,
        "processes": list(processes.places),
        "kinds": list(kinds.places),
        "names": [_meaning(name) for name in dict.fromkeys(kind[0] for kind in kinds.places)],
        "sources": list(sources.places),
        "places": _places(kinds.places, sources.places, rows),
        "requests": short_names(requests.places),
        "events": rows,
    }


def _places(kinds: Iterable[Any], sources: Iterable[str], rows: list[list[Any]]) -> dict[str, list[str]]:
    """Name of an event and its file -> [folder of its file, function, and "walk" if the walk through the code stops there], as far as they are known."""
    names, files = [kind[0] for kind in kinds], [source.partition(":")[0] for source in sources]
    places = {}
    for name, file in dict.fromkeys((names[row[2]], files[row[3]]) for row in rows):
        place = place_of(VOCABULARY[name].stage, file, name) if name in VOCABULARY else None
        if place is not None:
            places[f"{name} {file}"] = [*place, *(["walk"] if is_on_the_walk(place[1]) else [])]
    return places


def _open(recording: str | Path | Recording | Run) -> tuple[str, Iterable[Event]]:
    if isinstance(recording, Run):
        return "run " + " ".join(sorted(recording.run_ids)), recording.events
    opened = recording if isinstance(recording, Recording) else Recording(recording)
    return opened.directory.resolve().name, opened


def _meaning(name: str) -> list[Any]:
    """[name, phase, stage, meaning, counterpart in vLLM]; a name from another version's vocabulary has no meaning here."""
    row = VOCABULARY.get(name)
    return [name, row.phase, row.stage, row.meaning, row.vllm] if row is not None else [name, 0, "", "", "-"]


def short_names(request_ids: Iterable[str]) -> list[tuple[str, str]]:
    """(id, short name) of each request. The root of an id (see stagetrace.ids) is shown as the client's own name, if that is
    short and unique, else as a number; the rest, which distinguishes the prompts and answers of one request, stays."""
    ids = list(request_ids)
    roots = list(dict.fromkeys(map(root_of, ids)))
    given = {root: match[1] or match[2] for root in roots if (match := _GIVEN_ID.fullmatch(root))}
    times = Counter(given.values())
    names = {root: given[root] if times[given.get(root)] == 1 else f"#{n}" for n, root in enumerate(roots, start=1)}
    short = [
        request_id.replace(root_of(request_id), names[root_of(request_id)], 1).removesuffix("-0") for request_id in ids
    ]
    again = Counter(short)  # a client's name may equal that of another request's second prompt
    return [(i, name if again[name] == 1 else f"#{n}.{name}") for n, (i, name) in enumerate(zip(ids, short), start=1)]
