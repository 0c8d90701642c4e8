"""A recording as Chrome trace events (JSON), which Perfetto's UI and chrome://tracing open.

    requests      a pseudo process with one track per request: a slice from its first to its last event, and in it wait,
                  prefill, decode and preempted, and each of its events as an instant
    each process  its spans (engine.step, model.forward, ...) and the events of no request; one more track per socket thread,
                  with a slice per message; an arrow leads from sending to receiving
    counters      of each engine: KV-cache blocks used, requests running and waiting, tokens of the budget used
    workers       a process each; what a stage of a pipeline receives from the one before has an arrow too

The format allows slices of a track to nest, never to overlap. So all slices are begin/end pairs whose times never run
backwards on their track, times are decimal microseconds with all their nanoseconds, and what a crash left open ends with the
recording. Slice ends and arrows bind by their order in the file where times are equal: the file is written in that order.
Source of the format: "Trace Event Format" of the Chromium project; Perfetto's reader of it (importers/json).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stagetrace.event import Event
from stagetrace.export.lingering import Lingering
from stagetrace.private import private
from stagetrace.read.story import RequestStory, StepStory, Story

REQUESTS_PID = 1 << 23  # above every real process id, as are the numbers of the extra tracks
MESSAGE_NS = (
    20_000  # a message is an instant; a slice of this width (less if the next one follows sooner) holds its arrow
)
MAX_PENDING = 4096  # messages on their way
_SOCKETS = {
    "zmq.request_sent": "sends to the engine",
    "zmq.request_received": "input thread",
    "zmq.outputs_sent": "output thread",
    "zmq.outputs_received": "receives from the engine",
    "executor.step_sent": "sends to the workers",
    "worker.step_received": "receives from the executor",
    "worker.output_sent": "sends to the executor",
    "executor.output_received": "receives from the workers",
}


@dataclass
class _Track:
    """One row of the picture: its open slices, and its latest time."""

    pid: int
    tid: int
    open: list[str] = field(default_factory=list)
    now: int = 0  # of its latest beginning or end
    message_end: int = 0  # of the open message slice
    num_spans: int = 0  # of a request: how many of its spans are written or open
    last: int = 0  # of a request: time of its latest event


class PerfettoWriter:
    """Turns events in causal order into trace events in a file, one after another, in bounded memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        self._separator = b"\n"
        self._story = Story(on_step=self._counters)
        self._tracks: dict[tuple[int, str], _Track] = {}
        self._requests: dict[str, _Track] = {}
        self._ended = Lingering()
        self._sent: OrderedDict[str, tuple[_Track, int]] = OrderedDict()  # ref -> where and when a message left
        self._next_tid = REQUESTS_PID
        self._num_flows = 0

    def write(self, events: Iterable[Event]) -> None:
        """The whole file."""
        self._file.write(b'{"displayTimeUnit":"ns","traceEvents":[')
        self._put({"ph": "M", "name": "process_name", "pid": REQUESTS_PID, "args": {"name": "requests"}})
        for event in events:
            self._event(event)
        for track in self._tracks.values():
            self._end_message(track, track.message_end)
            while track.open:
                self._end(track, self._story.end_ns, {"unfinished": True})
        for request_id in list(self._requests):
            self._forget(request_id)
        headers = {f"{self._story.processes[pid]} {pid}": header for pid, header in self._story.headers.items()}
        self._file.write(b'\n],"otherData":' + self._encode(headers) + b"}\n")

    def _event(self, event: Event) -> None:
        self._story.feed(event)
        if event.name in _SOCKETS:
            self._message(event)
        elif event.ph != "i":
            self._span(event)
        elif event.req is None and event.name != "run.start":  # that one is written at the end
            self._instant(self._main(event), event)
        if event.req is not None:
            self._request(event)

    # Tracks

    def _main(self, event: Event) -> _Track:
        """The track of a process itself: the thread whose number is the process id."""
        return self._track(event.pid, event.pid, event.proc, event.proc)

    def _track(self, pid: int, tid: int, key: str, process: str) -> _Track:
        track = self._tracks.get((pid, key))
        if track is None:
            if not any(known.pid == pid for known in self._tracks.values()):
                self._put({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
            track = self._tracks[pid, key] = self._new_track(pid, tid, key)
        return track

    def _new_track(self, pid: int, tid: int, name: str) -> _Track:
        self._put({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        return _Track(pid, tid)

    def _new_tid(self) -> int:
        self._next_tid += 1
        return self._next_tid

    # Slices, instants, arrows

    def _begin(self, track: _Track, name: str, ts: int, args: dict[str, Any] | None = None) -> None:
        track.open.append(name)
        self._edge(track, ts, {"ph": "B", "name": name, "args": args or {}})

    def _end(self, track: _Track, ts: int, args: dict[str, Any] | None = None) -> None:
        self._edge(track, ts, {"ph": "E", "name": track.open.pop(), "args": args or {}})

    def _instant(self, track: _Track, event: Event) -> None:
        step = {} if event.step is None else {"step": event.step}
        self._at(track, event.ts, {"ph": "i", "s": "t", "name": event.name, "args": step | event.args})

    def _edge(self, track: _Track, ts: int, record: dict[str, Any]) -> None:
        """The beginning or end of a slice, never earlier than the one before it."""
        track.now = max(track.now, ts)
        self._at(track, track.now, record)

    def _at(self, track: _Track, ts: int, record: dict[str, Any]) -> None:
        self._put({"pid": track.pid, "tid": track.tid, "ts": _microseconds(ts), "cat": "stages"} | record)

    def _put(self, record: dict[str, Any]) -> None:
        self._file.write(self._separator + self._encode(record))
        self._separator = b",\n"

    def _span(self, event: Event) -> None:
        track = self._main(event)
        overlapping = self._overlapping(event.pid)
        if event.step is not None and (number := event.step % overlapping):
            name = f"{event.proc}, odd steps" if overlapping == 2 else f"{event.proc}, steps {number} of {overlapping}"
            track = self._tracks.get((event.pid, name)) or self._track(event.pid, self._new_tid(), name, event.proc)
        if event.ph == "B":
            args = {"req": event.req, "step": event.step, **event.args}
            self._begin(track, event.name, event.ts, {key: value for key, value in args.items() if value is not None})
            if event.args.get("kind") == "send":  # hidden states leave for the next stage of a pipeline
                self._remember(event.ref, track)
        elif event.name in track.open:  # an end whose beginning was not recorded is left out
            while track.open[-1] != event.name:
                self._end(track, event.ts, {"unfinished": True})
            if event.cause in self._sent:
                self._arrow(event.cause or "", track, event.ts, "collective")
            self._end(track, event.ts)

    def _overlapping(self, pid: int) -> int:
        """How many steps of a process may overlap: each of them needs a track of its own. A worker has one at a time."""
        settings = self._story.engines.get(pid, {}).get("scheduler_config", {})
        return max(2 if settings.get("async_scheduling") else 1, settings.get("pipeline_stages", 1))

    def _message(self, event: Event) -> None:
        name = _SOCKETS[event.name]
        track = self._tracks.get((event.pid, name))
        if track is None:
            self._main(event)
            track = self._track(event.pid, self._new_tid(), name, event.proc)
        self._end_message(track, min(track.message_end, event.ts))
        label = event.args.get("type") or ("step" if "step" in event.name else "outputs of step") + f" {event.step}"
        self._begin(track, label, event.ts, {"req": event.req} | event.args if event.req else event.args)
        track.message_end = event.ts + MESSAGE_NS
        if event.name.endswith("_sent"):
            self._remember(event.ref, track)
        elif event.cause in self._sent:
            self._arrow(event.cause or "", track, track.now, "zmq")

    def _remember(self, ref: str, track: _Track) -> None:
        self._sent[ref] = (track, track.now)
        if len(self._sent) > MAX_PENDING:
            self._sent.popitem(last=False)

    def _arrow(self, cause: str, track: _Track, ts: int, name: str) -> None:
        """From a sending to a receiving; a step is received by several workers."""
        sender, sent_ns = self._sent[cause]
        self._num_flows += 1
        flow = {"cat": name, "name": name, "id": self._num_flows}
        self._at(sender, sent_ns, {"ph": "s"} | flow)
        self._at(track, ts, {"ph": "f", "bp": "e"} | flow)

    def _end_message(self, track: _Track, ts: int) -> None:
        if track.message_end and track.open:
            self._end(track, ts)

    # Requests and counters

    def _request(self, event: Event) -> None:
        request_id = event.req or ""
        track = self._requests.get(request_id)
        if track is None:
            track = self._requests[request_id] = self._new_track(REQUESTS_PID, self._new_tid(), request_id)
            self._begin(track, request_id, event.ts)
        story = self._story.requests[request_id]
        self._spans(track, story)
        self._instant(track, event)
        track.last = event.ts
        if (over := self._ended.hear(request_id, event)) is not None:
            self._forget(over)

    def _spans(self, track: _Track, story: RequestStory) -> None:
        """The slices of the spans that began or ended with the latest event."""
        while track.num_spans < len(story.spans):
            if len(track.open) > 1:
                self._end_span(track, story)
            span = story.spans[track.num_spans]
            track.num_spans += 1
            self._begin(track, span.kind, span.start_ns, {"first_step": span.first_step})
        if story.reason is not None and len(track.open) > 1:
            self._end_span(track, story, {"reason": story.reason})

    def _end_span(self, track: _Track, story: RequestStory, more: dict[str, Any] | None = None) -> None:
        span = story.spans[track.num_spans - 1]
        self._end(track, span.end_ns, {"last_step": span.last_step, "num_tokens": span.num_tokens} | (more or {}))

    def _forget(self, request_id: str) -> None:
        """The request is over, or the recording is: end its slices at its last event."""
        track, story = self._requests.pop(request_id), self._story.requests.pop(request_id)
        self._story.deliveries.forget(request_id)
        if len(track.open) > 1:
            self._end_span(track, story, {"unfinished": True})
        self._end(track, track.last, {"reason": story.reason, "num_output_tokens": story.num_output_tokens})

    def _counters(self, step: StepStory) -> None:
        values: dict[str, dict[str, int]] = {
            "requests": {"running": step.running, "waiting": step.waiting},
            "token budget": {"used": step.total_tokens},
        }
        settings = self._story.engines.get(step.engine, {})
        if "num_blocks" in settings:  # the first block is never given to a request
            values["KV-cache blocks"] = {"used": settings["num_blocks"] - 1 - step.free_blocks}
        where = {"pid": step.engine, "tid": step.engine, "ts": _microseconds(step.start_ns)}
        for name, counted in values.items():
            self._put({"ph": "C", "name": name, **where, "args": counted})


def _microseconds(ns: int) -> msgspec.Raw:
    """All digits: a float of microseconds since boot loses the nanoseconds after some months."""
    sign = "-" if ns < 0 else ""
    return msgspec.Raw(f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}".encode())


def write_perfetto(events: Iterable[Event], path: str | Path) -> None:
    """Write the file that Perfetto opens (ui.perfetto.dev, "Open trace file"). Raises OSError."""
    with open(path, "wb", opener=private) as file:
        PerfettoWriter(file).write(events)
