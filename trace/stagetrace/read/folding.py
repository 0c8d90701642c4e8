"""Exchanges of tensors that follow each other in a worker, as one event: a step of six layers has 14 of them in each worker."""

from __future__ import annotations

from collections.abc import Iterator

from stagetrace.event import Event

NAME = "worker.collective"
_OF_A_LAYER = {"all_reduce", "all_gather"}  # what stages send each other stays: it crosses from lane to lane


class Folding:
    """Takes events in order, and gives them back with one in place of each row of exchanges of the same kind in the same process and
    step. It is given when the row has ended: with the next event of its process."""

    def __init__(self) -> None:
        self._rows: dict[int, Event] = {}  # by pid: what stands for the exchanges so far
        self._begun: dict[int, int] = {}  # by pid: when the exchange began that has not ended

    def feed(self, event: Event) -> Iterator[Event]:
        """What can be shown now that this event has come."""
        row = self._rows.get(event.pid)
        if not is_exchange(event):
            yield from self._end(event.pid)
            yield event
            return
        if row is None or (row.step, row.args["kind"]) != (event.step, event.args["kind"]):
            yield from self._end(event.pid)
            row = self._rows[event.pid] = _row(event)
        row.ts = event.ts
        if event.ph == "B":
            row.args["exchanges"] += 1
            row.args["bytes"] += event.args.get("bytes", 0)
            self._begun[event.pid] = event.ts
        elif (begun := self._begun.pop(event.pid, None)) is not None:
            row.args["ms"] += (event.ts - begun) / 1e6

    def finish(self) -> Iterator[Event]:
        """The rows that nothing came after."""
        for pid in list(self._rows):
            yield from self._end(pid)

    def _end(self, pid: int) -> Iterator[Event]:
        if (row := self._rows.pop(pid, None)) is not None:
            yield row


def is_exchange(event: Event) -> bool:
    """Is it one of those that a layer, or the sampler, waits for?"""
    return event.name == NAME and event.args.get("kind") in _OF_A_LAYER


def _row(first: Event) -> Event:
    args = {"exchanges": 0, "kind": first.args["kind"], "bytes": 0, "ms": 0.0}
    return Event(
        first.v,
        first.seq,
        first.ts,
        first.pid,
        first.proc,
        "i",
        NAME,
        first.phase,
        first.src,
        step=first.step,
        args=args,
    )
