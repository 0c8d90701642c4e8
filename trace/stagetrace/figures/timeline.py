"""Requests over steps or time: who waited, computed its prompt, decoded, was preempted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagetrace.figures.names import columns, drawn_names, plural, short_names
from stagetrace.figures.style import (
    INK,
    KINDS,
    MANY,
    Box,
    boxes,
    legend,
    new_figure,
    note,
    row_labels,
    step_ticks,
    write,
)
from stagetrace.read.story import RequestStory, StepStory, Story, one_engine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ["wait", "prefill", "decode", "no tokens", "preempted"]
HALF = 0.38  # of the height of a bar
MARKS = {
    "prefix hit": ("^", "white"),
    "finished": ("s", "black"),
    "aborted": ("X", "black"),
    "recording ends": (">", "white"),
}


@dataclass
class Stretch:
    """Columns (places in `story.steps`) in which a request was in one state.

    kind is wait, prefill, decode, preempted, or "no tokens": it runs, but the budget did not reach it.
    """

    kind: str
    first: int
    last: int
    chunks: list[int] = field(default_factory=list)  # tokens of each step, of prefill and decode; drafts not counted


def lifetime(story: Story, request: RequestStory) -> range:
    """The columns whose decision saw the request: after it was queued, and before it had ended."""
    if not request.spans:
        return range(0)
    first = bisect_left(story.steps, request.in_engine_ns, key=lambda step: _decided(story, step))
    end = request.first.get("sched.finished", story.end_ns)
    return range(first, bisect_right(story.steps, end, key=lambda step: step.start_ns))


def _decided(story: Story, step: StepStory) -> int:
    return step.decided_ns or step.end_ns or story.end_ns


def stretches(story: Story, request: RequestStory) -> list[Stretch]:
    """The request's life in the engine, column by column, equal neighbours joined."""
    found: list[Stretch] = []
    starts = [span.start_ns for span in request.spans]
    for column in lifetime(story, request):
        step = story.steps[column]
        kind = request.spans[bisect_right(starts, _decided(story, step)) - 1].kind
        scheduled = step.scheduled.get(request.request_id)
        if scheduled is None and kind in ("prefill", "decode"):
            kind = "no tokens"
        if not found or found[-1].kind != kind:
            found.append(Stretch(kind, column, column))
        found[-1].last = column
        if scheduled is not None:
            found[-1].chunks.append(scheduled.num_tokens)
    return found


def ending(request: RequestStory) -> str:
    """Which mark its end has: finished, aborted, or "recording ends"."""
    if request.reason is None:
        return "recording ends"
    return "aborted" if request.reason in ("abort", "error") else "finished"


def in_engine(story: Story) -> list[RequestStory]:
    """The requests that reached the scheduler, in that order."""
    return sorted((r for r in story.requests.values() if r.spans), key=lambda r: r.in_engine_ns)


def request_timeline(story: Story, x: str = "step") -> Figure:
    """One row per request: waiting, prefill with the tokens of each chunk, decode, preempted, prefix hits, its end.

    x is "step" (every step equally wide) or "time" (milliseconds since the first request was queued). Raises ValueError for another x,
    TraceError without matplotlib.
    """
    story = one_engine(story)
    if x not in ("step", "time"):
        raise ValueError(f'x is "step" or "time", not {x!r}')
    requests = in_engine(story)
    height = min(max(0.24 * len(requests), 0.6), 11)
    what = f"over {plural(len(story.steps), 'engine step')}" if x == "step" else "in time"
    title = f"{plural(len(requests), 'request')} {what}: waiting, prefill, decode"
    figure, (axes,) = new_figure(height + 1.5, title=title)
    if not requests:
        note(figure, "The recording holds no event of the scheduler about a request.")
        return figure
    if x == "step":
        _draw_steps(axes, story, requests)
    else:
        _draw_time(axes, story, requests)
    names = drawn_names(story.requests)
    row_labels(axes, [names[request.request_id] for request in requests], height)
    return figure


def _draw_steps(axes: Axes, story: Story, requests: list[RequestStory]) -> None:
    rows = [stretches(story, request) for request in requests]
    places: dict[str, list[Box]] = {kind: [] for kind in SHOWN}
    for y, row in enumerate(rows):
        for stretch in row:
            # each a box of its own; whatever else lasts is one box
            chunks = stretch.kind == "prefill" and len(story.steps) < 300
            parts = (
                [(c, c) for c in range(stretch.first, stretch.last + 1)] if chunks else [(stretch.first, stretch.last)]
            )
            places[stretch.kind] += [(first - 0.5, y - HALF, last - first + 1, 2 * HALF) for first, last in parts]
    step_ticks(axes, [step.step for step in story.steps])
    marks: dict[str, list[tuple[float, float]]] = {name: [] for name in MARKS}
    for y, (request, row) in enumerate(zip(requests, rows)):
        _write_chunks(axes, row, y, len(story.steps), len(rows))
        columns_ = lifetime(story, request)
        marks["prefix hit"] += [(c - 0.5, y) for c in columns_ if request.request_id in story.steps[c].prefix_hits]
        marks[ending(request)].append(((row[-1].last if row else columns_.start) + 0.5, y))
    _draw(axes, places, marks)


def _write_chunks(axes: Axes, row: list[Stretch], y: int, num_steps: int, num_rows: int) -> None:
    """The tokens of each prefill: in its column, or after it where columns are narrower than numbers."""
    column = 8.5 * 72 / max(num_steps, 20)  # points
    size = min(8.0, 11 * 72 / num_rows * 0.6)
    after = dict(zip((id(stretch) for stretch in row), row[1:]))
    for stretch in row if size > 4 else []:
        if stretch.kind != "prefill":
            continue
        if column > max(len(str(chunk)) for chunk in stretch.chunks) * 0.62 * size + 1:
            for place, chunk in enumerate(stretch.chunks, start=stretch.first):
                write(axes, place, y, str(chunk), size, KINDS["prefill"])
        else:
            text, room = "+".join(map(str, stretch.chunks)), after.get(id(stretch))
            width = (room.last - room.first + 1) * column if room is not None and room.kind == "decode" else 0
            if width > len(text) * 0.62 * size + 4:
                write(axes, stretch.last + 0.5, y, " " + text, size, KINDS["decode"], ha="left")


def span_end(story: Story, request: RequestStory, place: int) -> int:
    """When a span of the request ended; what was still open when the recording ended lasts until then."""
    span = request.spans[place]
    if place + 1 < len(request.spans) or request.reason is not None or not story.steps:
        return span.end_ns
    return max(span.end_ns, story.steps[-1].end_ns or story.end_ns)


def _draw_time(axes: Axes, story: Story, requests: list[RequestStory]) -> None:
    zero = requests[0].in_engine_ns
    places: dict[str, list[Box]] = {kind: [] for kind in SHOWN}
    marks: dict[str, list[tuple[float, float]]] = {name: [] for name in MARKS}
    row_of = {request.request_id: y for y, request in enumerate(requests)}
    for step in story.steps:
        marks["prefix hit"] += [((step.start_ns - zero) / 1e6, row_of[i]) for i in step.prefix_hits if i in row_of]
    ends = [[(span_end(story, r, place) - zero) / 1e6 for place in range(len(r.spans))] for r in requests]
    last = max(row[-1] for row in ends)
    for y, (request, row) in enumerate(zip(requests, ends)):
        for span, end in zip(request.spans, row):
            start = (span.start_ns - zero) / 1e6
            places[span.kind].append((start, y - HALF, end - start, 2 * HALF))
            if span.kind == "prefill" and end - start > 0.008 * last * len(str(span.num_tokens)) and len(requests) < 60:
                write(axes, (start + end) / 2, y, str(span.num_tokens), 8, KINDS["prefill"])
        marks[ending(request)].append((row[-1], y))
    _draw(axes, places, marks)
    axes.set_xlim(-0.01 * last - 1e-3, last * 1.02 + 1e-3)
    axes.set_xlabel("ms since the first request was queued", fontsize=9)


def _draw(axes: Axes, places: dict[str, list[Box]], marks: dict[str, list[tuple[float, float]]]) -> None:
    """Fill the rows, set the marks, and explain what was drawn."""
    crowded = len({y for points in marks.values() for _, y in points}) > 60
    plain = crowded or sum(map(len, places.values())) > MANY
    for kind, rectangles in places.items():
        boxes(axes, rectangles, KINDS[kind], plain)
    for name, points in marks.items():
        if points:
            marker, colour = MARKS[name]
            xs, ys = zip(*points)
            axes.plot(
                xs,
                ys,
                marker,
                color=colour,
                markeredgecolor=INK,
                markersize=2.5 if crowded else 5,
                clip_on=False,
                zorder=3,
            )
    text = {"prefill": "prefill (its tokens)", "no tokens": "running, no tokens", "wait": "waiting"}
    shown = {text.get(kind, kind): KINDS[kind] for kind, rectangles in places.items() if rectangles}
    legend(axes, shown, {name: MARKS[name] for name, points in marks.items() if points}, plain=plain)


def request_timeline_table(story: Story) -> str:
    """One line per stretch of each request: the steps, the tokens of each, and at its end why it ended."""
    story = one_engine(story)
    names, rows = short_names(story.requests), []
    for request in in_engine(story):
        life = stretches(story, request)
        for stretch in life:
            first, last = story.steps[stretch.first].step, story.steps[stretch.last].step
            hit = [
                story.steps[c].prefix_hits.get(request.request_id, 0) for c in range(stretch.first, stretch.last + 1)
            ]
            chunks = "+".join(map(str, stretch.chunks)) if stretch.kind == "prefill" else str(sum(stretch.chunks) or "")
            cached = str(sum(hit) or "")
            rows.append([names[request.request_id], stretch.kind, str(first), str(last), chunks, cached, ""])
        if not life:
            rows.append([names[request.request_id], "no step", "", "", "", "", ""])
        rows[-1][-1] = request.reason or "recording ends"
    return columns(["request", "what", "from step", "to step", "tokens", "from cache", "end"], rows)
