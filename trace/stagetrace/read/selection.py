"""Which events are selected: filters over an event stream, and a request by a part of its id."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.ids import is_beam
from stagetrace.read.terminal import short_id
from stagetrace.vocabulary import VOCABULARY


@dataclass(frozen=True)
class Selection:
    """What an event must be to be shown; None or empty selects all."""

    phases: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()  # patterns like sched.*
    req: str | None = None
    proc: str | None = None  # pattern, name or pid
    steps: tuple[int, int] | None = None  # first and last

    def takes(self, event: Event) -> bool:
        """Is this event selected?"""
        return (
            (not self.phases or event.phase in self.phases)
            and (not self.names or any(fnmatchcase(event.name, pattern) for pattern in self.names))
            and (self.req is None or (event.req is not None and names_request(self.req, event.req)))
            and (self.proc is None or fnmatchcase(event.proc, self.proc) or self.proc == str(event.pid))
            and (self.steps is None or (event.step is not None and self.steps[0] <= event.step <= self.steps[1]))
        )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The flags that make a Selection."""
    parser.add_argument("--phase", metavar="N", help="only these phases: 8, 6-9, or 6,7,9")
    parser.add_argument(
        "--name",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only these events, like 'sched.*'; may be repeated",
    )
    parser.add_argument(
        "--req",
        metavar="ID",
        help="only this request: its id, the short one that is printed, or 4 or more of its characters",
    )
    parser.add_argument("--proc", metavar="PATTERN", help="only this process: a name like 'EngineCore*', or a pid")
    parser.add_argument("--step", metavar="N-M", help="only these steps of the engine: 17, or 17-20")


def selection_of(args: argparse.Namespace) -> Selection:
    """The Selection that the flags describe. Raises TraceError."""
    phases = phases_of(args.phase)
    for pattern in args.name:
        if not any(fnmatchcase(name, pattern) for name in VOCABULARY):
            raise TraceError(f"--name {pattern}: no event has such a name; trace/stagetrace/vocabulary.py has them all")
    steps = _range(args.step, "--step") if args.step else None
    return Selection(
        phases, tuple(args.name), args.req, args.proc, None if steps is None else (steps.start, steps.stop - 1)
    )


def phases_of(text: str | None) -> frozenset[int]:
    """`8`, `6-9` or `6,7,9`; empty for None. Raises TraceError."""
    return frozenset(number for part in (text or "").split(",") if part for number in _range(part, "--phase"))


def _range(text: str, flag: str) -> range:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if match is None:
        raise TraceError(f"{flag} {text}: expected a number like 8 or a range like 6-9")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def names_request(part: str, request_id: str) -> bool:
    """Does this part of an id match this request?"""
    return part in (request_id, short_id(request_id)) or (len(part) >= 4 and part in request_id)


def pick_request(part: str, request_ids: Iterable[str]) -> str:
    """The one request with this id, else this short id, else any such part. Raises TraceError for none or several."""
    ids = list(request_ids)
    for fits in (
        [one for one in ids if one == part],
        [one for one in ids if short_id(one) == part],
        [one for one in ids if part in one and not is_beam(one)],  # a part names the request that searches
        [one for one in ids if part in one],
    ):
        if len(fits) == 1:
            return fits[0]
        if fits:
            more = "" if len(fits) <= 3 else f" and {len(fits) - 3} more"
            raise TraceError(f"--req {part} matches several requests: {', '.join(fits[:3])}{more}; give more of the id")
    known = ", ".join(sorted(map(short_id, ids))[:5]) or "none"
    raise TraceError(f"--req {part}: no such request in this recording (it has {known}{', …' if len(ids) > 5 else ''})")
