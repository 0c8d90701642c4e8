"""What the player's page holds of a recording: each event once, as a row of numbers, and the tables that they point into."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.reader import Recording, Run
from stagetrace.vocabulary import VOCABULARY

MAX_EVENTS = 200_000
"""A page above this would take a browser many seconds to open: some 10,000 steps of ten requests."""

_GIVEN_ID = re.compile(r"(?P<child>\d+_)?(?:chat)?cmpl-(?P<name>[^#]{1,10})-[0-9a-f]{8}(?P<prompt>-\d+)?")
"""Ids of requests that came with X-Request-Id: `cmpl-r0-b281c1bc-0` is called `r0` on the page."""


class _Table:
    """Values in the order in which they came, each once; an event says the place of its value."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def place(self, value: Any) -> int:
        return self.places.setdefault(value, len(self.places))


def page_data(recording: str | Path | Recording | Run) -> dict[str, Any]:
    """One recording for the page: title, tables, and `events` with the columns [microseconds since the start, process,
    name, source, phase letter, args, step, request, cause]; -1 = none, `cause` is the place of another event.

    Raises FileNotFoundError when there is no recording, TraceError when it is empty or has more than MAX_EVENTS events.
    """
    title, events = _open(recording)
    names, processes, sources, requests, refs = _Table(), _Table(), _Table(), _Table(), _Table()
    rows: list[list[Any]] = []
    for event in events:
        if len(rows) == MAX_EVENTS:
            raise TraceError(
                f"{title} has more than {MAX_EVENTS} events, too many for one page: record fewer requests or names "
                "(see --trace-* of serve), or export it for Perfetto"
            )
        refs.place(event.ref)
        rows.append(
            [
                event.ts, processes.place((event.pid, event.proc)), names.place(event.name), sources.place(event.src),
                "iBE".find(event.ph), event.args, -1 if event.step is None else event.step,
                -1 if event.req is None else requests.place(event.req), event.cause,
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
        "names": [_meaning(name) for name in names.places],
        "sources": list(sources.places),
        "requests": short_names(requests.places),
        "events": rows,
    }


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
    """(id, short name) of each request: what the client called it where that is short and unique, else its number."""
    ids = list(request_ids)
    short = []
    for number, request_id in enumerate(ids, start=1):
        given = _GIVEN_ID.fullmatch(request_id)
        if given is None:
            short.append(f"#{number}")
        else:
            prompt = given["prompt"] if given["prompt"] not in (None, "-0") else ""
            short.append((given["child"] or "") + given["name"] + prompt)
    times = Counter(short)
    unique = [name if times[name] == 1 else f"#{number}" for number, name in enumerate(short, start=1)]
    return list(zip(ids, unique))
