"""A recording as tables (CSV): one row per request, per engine step, or per event. `REQUESTS`, `STEPS` and `EVENTS` name the columns.

Times are nanoseconds of the machine's monotonic clock, durations nanoseconds; an empty cell means that it was not recorded.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.private import FOLDER_MODE, private
from stagetrace.read.bounded import tell_bounded
from stagetrace.read.story import RequestStory, StepStory

REQUESTS: dict[str, Callable[[RequestStory], Any]] = {
    "request": lambda r: r.request_id,
    "prompt_tokens": lambda r: r.num_prompt_tokens,
    "cached_tokens": lambda r: r.num_cached_tokens,  # found in the prefix cache
    "output_tokens": lambda r: r.num_output_tokens,
    "preemptions": lambda r: r.num_preemptions,
    "reason": lambda r: r.reason,  # of its end
    "engine_pids": lambda r: " ".join(map(str, r.engines)),  # several if one died and another took over
    "first_event_ns": lambda r: min(r.first.values()),
    "queued_ns": lambda r: r.first.get("sched.queued"),
    "first_token_ns": lambda r: r.token_ns[0] if r.token_ns else None,  # in the engine
    "last_token_ns": lambda r: r.token_ns[-1] if r.token_ns else None,
    "first_chunk_ns": lambda r: r.chunk_ns[0] if r.chunk_ns else None,  # on its way to the client
    "last_event_ns": lambda r: max(r.last.values()),
    "wait_ns": lambda r: _total(r, "wait"),  # the durations of its spans in the engine
    "prefill_ns": lambda r: _total(r, "prefill"),
    "decode_ns": lambda r: _total(r, "decode"),
    "preempted_ns": lambda r: _total(r, "preempted"),
}
"""Columns of requests.csv."""

STEPS: dict[str, Callable[[StepStory], Any]] = {
    "step": lambda s: s.step,
    "engine_pid": lambda s: s.engine,  # with several engines, a step is known by both
    "start_ns": lambda s: s.start_ns,
    "end_ns": lambda s: s.end_ns,
    "forward_start_ns": lambda s: s.forward_ns[0] or None,
    "forward_end_ns": lambda s: s.forward_ns[1] or None,
    "running": lambda s: s.running,  # requests, when it began
    "waiting": lambda s: s.waiting,
    "budget": lambda s: s.budget,  # tokens
    "scheduled_tokens": lambda s: s.total_tokens,
    "scheduled_requests": lambda s: len(s.scheduled),
    "drafts": lambda s: sum(scheduled.num_drafts for scheduled in s.scheduled.values()),
    "new_tokens": lambda s: sum(s.tokens.values()),
    "free_blocks": lambda s: s.free_blocks,  # after the decision
    "admitted": lambda s: " ".join(s.admitted),  # request ids
    "resumed": lambda s: " ".join(s.resumed),
    "preempted": lambda s: " ".join(s.preempted),
    "finished": lambda s: " ".join(s.finished),
    "held_back_by": lambda s: s.held_back.get("rule"),  # why the first waiting one was not admitted
}
"""Columns of steps.csv; a step that the recording breaks off has no row."""

EVENTS: dict[str, Callable[[Event], Any]] = {
    "ts_ns": lambda e: e.ts,
    "process": lambda e: e.proc,
    "pid": lambda e: e.pid,
    "seq": lambda e: e.seq,  # within its process
    "phase": lambda e: e.phase,
    "name": lambda e: e.name,
    "kind": lambda e: e.ph,  # i = instant, B = begin, E = end
    "source": lambda e: e.src,
    "request": lambda e: e.req,
    "step": lambda e: e.step,
    "cause": lambda e: e.cause,  # pid:seq of the event in another process that made it happen
    "args": lambda e: json.dumps(e.args, default=str),
}
"""Columns of events.csv, in causal order."""

_COLUMNS: dict[str, dict[str, Any]] = {"requests.csv": REQUESTS, "steps.csv": STEPS, "events.csv": EVENTS}


def _total(request: RequestStory, kind: str) -> int:
    return sum(span.end_ns - span.start_ns for span in request.spans if span.kind == kind)


def write_tables(events: Iterable[Event], target: str | Path) -> None:
    """All three tables into the folder `target` (created if missing), or the one of that name if it ends in .csv.

    Raises TraceError for another name or a folder that does not exist.
    """
    path = Path(target)
    if path.suffix == ".csv" and path.name not in _COLUMNS:
        raise TraceError(f"{target}: there is no such table; name a folder, or one of {', '.join(_COLUMNS)} in it")
    folder, names = (path.parent, [path.name]) if path.suffix == ".csv" else (path, list(_COLUMNS))
    if not folder.parent.is_dir() or (path.suffix == ".csv" and not folder.is_dir()):
        missing = folder if path.suffix == ".csv" else folder.parent
        raise TraceError(f"{target}: the folder {missing} does not exist; create it first")
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    with ExitStack() as stack:
        write = {name: _table(stack, folder / name, _COLUMNS[name]) for name in names}
        requests, steps, each_event = (write.get(name, _leave_out) for name in _COLUMNS)
        tell_bounded(events, requests, steps, each_event)


def _leave_out(row: object) -> None:
    """A table that was not asked for."""


def _table(stack: ExitStack, path: Path, columns: dict[str, Callable[[Any], Any]]) -> Callable[[Any], None]:
    """What writes a row to a new table."""
    writer = csv.writer(stack.enter_context(open(path, "w", newline="", encoding="utf-8", opener=private)))
    writer.writerow(columns)
    return lambda row: writer.writerow([value(row) for value in columns.values()])
