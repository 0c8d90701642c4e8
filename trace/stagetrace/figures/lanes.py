"""The processes over time: what each did, and the messages between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagetrace.errors import TraceError
from stagetrace.figures.names import columns, drawn_names, milliseconds, short_names
from stagetrace.figures.style import INK, KINDS, PALE, Box, boxes, legend, new_figure, note, spread
from stagetrace.read.lanes import place_of_worker
from stagetrace.read.story import Message, RequestStory, StepStory, Story, of_engine, one_engine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRONT_END_EVENTS = [
    "http.request", "request.validated", "request.templated", "request.tokenized", "zmq.request_sent", "request.detokenized",
    "generate.yield", "sse.chunk", "http.response", "request.finished", "request.aborted",
]  # fmt: skip
"""What the API process says about a request, in the order of the phases."""

FEW_ARROWS = 120  # more messages than this are thin lines without heads
ARROWS = {"zmq.request_sent": ("-", "#b34a00"), "zmq.outputs_sent": ("--", "#005a8c")}
MARKS = {"HTTP request": ("v", "white"), "chunk to the client": ("|", INK), "request ends": ("s", "black")}


@dataclass
class Scene:
    """What happens in a stretch of time: from the recording's first request on, or during one request."""

    start_ns: int
    end_ns: int
    requests: list[RequestStory]
    steps: list[StepStory]
    messages: list[Message]
    front_ends: list[int]  # pids
    engine: int | None  # pid of the process whose steps these are


def scene(story: Story, req: str | None = None) -> Scene:
    """Choose what to show; `req` is a request's id or its short name. Raises TraceError if no request has it."""
    requests = [find_request(story, req)] if req is not None else list(story.requests.values())
    times = [time for request in requests for time in (*request.first.values(), *request.last.values())]
    start, end = min(times, default=story.start_ns), max(times, default=story.end_ns)
    steps = [step for step in story.steps if step.start_ns <= end and (step.end_ns or story.end_ns) >= start]
    if req is not None:
        steps = [step for step in steps if requests[0].request_id in step.scheduled]
    messages = [message for message in story.messages if start <= message.sent_ns <= end]
    if req is not None:
        numbers, abort = {step.step for step in steps}, _abort(story, requests[0])
        messages = [m for m in messages if m.req == requests[0].request_id or m is abort or m.step in numbers]
    engines = [pid for pid, name in story.processes.items() if name.startswith("EngineCore")] or list(story.processes)
    engine = engines[0] if engines else None
    helpers = {pid for pid, name in story.processes.items() if place_of_worker(name) or name == "DPCoordinator"}
    # one process is both
    front_ends = [pid for pid in story.processes if pid != engine and pid not in helpers] or list(story.processes)
    return Scene(start, end, requests, steps, messages, front_ends, engine)


def _abort(story: Story, request: RequestStory) -> Message | None:
    """The message that ended the request from outside. It names no request: it is the first such one after the decision to send it."""
    decided = request.first.get("request.stop_matched", request.first.get("request.aborted", story.end_ns))
    for message in story.messages:
        if message.name == "zmq.request_sent" and message.req is None and message.sent_ns >= decided:
            return message
    return None


def find_request(story: Story, req: str) -> RequestStory:
    """A request by its id or short name. Raises TraceError if there is none."""
    names = short_names(story.requests)
    for request_id, request in story.requests.items():
        if req in (request_id, names[request_id]):
            return request
    known = ", ".join(list(names.values())[:8]) or "none"
    raise TraceError(f"no request {req!r} in this recording; there is {known}")


def process_lanes(story: Story, req: str | None = None) -> Figure:
    """A lane for each front-end process, and three for the engine: its input thread, its output thread, its busy loop with steps
    and forward passes. An arrow leads from each send over ZMQ to its receipt.

    With `req` only what concerns that request, whose events in the front end have letters. Raises TraceError without
    matplotlib, or when `req` is unknown.
    """
    story = _own(story, req)
    shown = scene(story, req)
    names = drawn_names(story.requests)
    whose = f"Request {names[shown.requests[0].request_id]}" if req is not None else "All requests"
    lanes = _lanes(story, shown)
    figure, (axes,) = new_figure(
        0.75 * len(lanes) + 1.9, title=f"{whose}: what the processes do, and their messages over ZMQ"
    )
    if not shown.requests:
        note(figure, "The recording holds no request.")
        return figure
    axes.set_yticks(range(len(lanes)), [label for _, label in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.75)
    for y in range(len(lanes)):
        axes.axhline(y, color=PALE, linewidth=0.6, zorder=0)
    place = {key: y for y, (key, _) in enumerate(lanes)}
    _draw_engine(axes, shown, place["busy loop"])
    _draw_messages(axes, shown, place)
    if req is not None:
        _draw_letters(axes, shown)
    else:
        _draw_requests(axes, shown, names)
    span = (shown.end_ns - shown.start_ns) / 1e6 or 1.0
    axes.set_xlim(-0.02 * span, span * 1.02)
    axes.set_xlabel(f"ms since {'the request' if req is not None else 'the first request'} came", fontsize=9, color=INK)
    return figure


def _own(story: Story, req: str | None) -> Story:
    """Of several engines the first one, or the one that had this request last."""
    engines = find_request(story, req).engines if req is not None else []
    return of_engine(story, engines[-1]) if engines else one_engine(story)


def _lanes(story: Story, shown: Scene) -> list[tuple[int | str, str]]:
    """(key, label) from the top down."""
    lanes: list[tuple[int | str, str]] = [(pid, f"{story.processes[pid]}\n{pid}") for pid in shown.front_ends]
    engine = story.processes.get(shown.engine or 0, "engine")
    lanes += (
        [("input", f"{engine} {shown.engine or ''}\ninput thread"), ("output", "output thread")]
        if shown.messages
        else []
    )
    return [*lanes, ("busy loop", "busy loop" if shown.messages else f"{engine}\nbusy loop")]


def _draw_engine(axes: Axes, shown: Scene, y: int) -> None:
    def box(start: int, end: int, half: float) -> Box:
        return ((start - shown.start_ns) / 1e6, y - half, (end - start) / 1e6, 2 * half)

    plain = len(shown.steps) > 150
    whole = [box(step.start_ns, step.end_ns or shown.end_ns, 0.32) for step in shown.steps]
    forward = [box(*step.forward_ns, 0.2) for step in shown.steps if step.forward_ns[0]]
    boxes(axes, whole, KINDS["engine step"], plain)
    boxes(axes, forward, KINDS["model"], plain)
    if not shown.steps:
        axes.text(
            0.5,
            y,
            "no step of the engine in the recording",
            transform=axes.get_yaxis_transform(),
            ha="center",
            va="center",
            fontsize=9,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none"},
        )
    width, free = (shown.end_ns - shown.start_ns) / 1e6, -1.0
    for step in shown.steps:  # numbers that would cover each other are left out
        middle = ((step.start_ns + (step.end_ns or shown.end_ns)) / 2 - shown.start_ns) / 1e6
        half = 0.006 * len(str(step.step)) * width
        if middle - half > free:
            axes.text(middle, y + 0.34, str(step.step), fontsize=7.5, color=INK, ha="center", va="top", in_layout=False)
            free = middle + half


def _draw_messages(axes: Axes, shown: Scene, place: dict[int | str, int]) -> None:
    """Requests go down to the input thread, outputs up from the output thread."""
    from matplotlib.collections import LineCollection

    for name, (linestyle, colour) in ARROWS.items():
        arrows = []
        for message in shown.messages:
            rows: tuple[int | str, int | str] = (message.sender, "input")
            if name == "zmq.outputs_sent":
                rows = ("output", message.receiver)
            if message.name == name and all(row in place for row in rows):
                times = (message.sent_ns, message.received_ns)
                arrows.append([((time - shown.start_ns) / 1e6, place[row]) for time, row in zip(times, rows)])
        if len(shown.messages) > FEW_ARROWS:
            axes.add_collection(LineCollection(arrows, colors=colour, linewidths=0.4), autolim=False)
            continue
        for start, end in arrows:
            line = {"arrowstyle": "-|>", "linestyle": linestyle, "color": colour, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", end, start, arrowprops=line)


def _draw_requests(axes: Axes, shown: Scene, names: dict[str, str]) -> None:
    """Arrivals with their names, chunks and ends, in the lane of the front end."""

    def at(time: int) -> float:
        return (time - shown.start_ns) / 1e6

    arrivals = [(at(r.first["http.request"]), names[r.request_id]) for r in shown.requests if "http.request" in r.first]
    points = {
        "HTTP request": [x for x, _ in arrivals],
        "chunk to the client": [at(time) for r in shown.requests for time in r.chunk_ns],
        "request ends": [
            at(r.first[name])
            for r in shown.requests
            for name in ("request.finished", "request.aborted")
            if name in r.first
        ],
    }
    height = {"HTTP request": -0.22, "chunk to the client": 0.0, "request ends": 0.0}
    for name, xs in points.items():
        marker, colour = MARKS[name]
        axes.plot(
            xs,
            [height[name]] * len(xs),
            marker,
            color=colour,
            markeredgecolor=INK,
            markersize=9 if marker == "|" else 6,
        )
    _label(axes, shown, sorted(arrivals))
    _explain(axes, shown, {name: MARKS[name] for name, xs in points.items() if xs})


def _label(axes: Axes, shown: Scene, labels: list[tuple[float, str]]) -> None:
    """Write labels above the front end's lane, moved aside where they would cover each other; none when there is no room for all."""
    width = (shown.end_ns - shown.start_ns) / 1e6 or 1.0
    gap = 0.01 * width * (1 + max((len(text) for _, text in labels), default=0))
    if gap * len(labels) > width:
        return
    for (x, text), place in zip(labels, spread([x for x, _ in labels], gap, width)):
        line = {"arrowstyle": "-", "color": PALE, "linewidth": 0.7}
        axes.annotate(text, (x, 0), (place, -0.5), fontsize=8.5, ha="center", va="center", color=INK, arrowprops=line)


def _explain(axes: Axes, shown: Scene, marks: dict[str, tuple[str, str]]) -> None:
    looks = {"engine step (its number)": KINDS["engine step"], "forward pass of the model": KINDS["model"]}
    sent = {"zmq.request_sent": "request over ZMQ", "zmq.outputs_sent": "outputs over ZMQ"}
    lines = {sent[name]: ARROWS[name] for name in sent if any(message.name == name for message in shown.messages)}
    legend(axes, looks if shown.steps else {}, marks, lines)


def letters(shown: Scene) -> list[tuple[str, str, int]]:
    """(letter, event, time) of the front end's events about the one request, in the order of time."""
    first = shown.requests[0].first
    events = sorted((first[name], name) for name in FRONT_END_EVENTS if name in first)
    return [(chr(ord("A") + i), name, time) for i, (time, name) in enumerate(events)]


def _draw_letters(axes: Axes, shown: Scene) -> None:
    """A letter per event above the lane, moved to the right where they would cover each other; their meaning is below."""
    found = letters(shown)
    _label(axes, shown, [((time - shown.start_ns) / 1e6, letter) for letter, _, time in found])
    chunks = [(time - shown.start_ns) / 1e6 for time in shown.requests[0].chunk_ns]
    axes.plot(chunks, [0] * len(chunks), "|", color=INK, markersize=9)
    key = [f"{letter}  {name} {milliseconds(time - shown.start_ns)}" for letter, name, time in found]
    lines = ["     ".join(key[i : i + 4]) for i in range(0, len(key), 4)]
    axes.annotate(
        "\n".join(lines),
        (0, 0),
        (0, -34),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8.5,
        va="top",
        color=INK,
    )
    _explain(axes, shown, {"chunk to the client": MARKS["chunk to the client"]} if chunks else {})


@dataclass(frozen=True)
class Entry:
    """One line of the table; took_ns is None for what has no duration."""

    time_ns: int
    process: str
    what: str
    took_ns: int | None = None


def process_lanes_table(story: Story, req: str | None = None) -> str:
    """All that the figure shows, in the order of time: milliseconds, process, what, and how long it took. Raises TraceError when
    `req` is unknown."""
    story = _own(story, req)
    shown = scene(story, req)
    entries = [*_front_end_entries(story, shown), *_step_entries(story, shown), *_message_entries(story, shown)]
    rows = [
        [
            milliseconds(entry.time_ns - shown.start_ns),
            entry.process,
            entry.what,
            "" if entry.took_ns is None else milliseconds(entry.took_ns),
        ]
        for entry in sorted(entries, key=lambda entry: entry.time_ns)
    ]
    return columns(["ms", "process", "what", "took ms"], rows)


def _process(story: Story, pid: int | None) -> str:
    return f"{story.processes[pid]} {pid}" if pid in story.processes else "-"


def _front_end_entries(story: Story, shown: Scene) -> Iterator[Entry]:
    names, process = short_names(story.requests), _process(story, next(iter(shown.front_ends), shown.engine))
    for request in shown.requests:
        times = {name: [request.first[name]] for name in FRONT_END_EVENTS if name in request.first}
        if request.chunk_ns:
            times["sse.chunk"] = request.chunk_ns
        for name, moments in times.items():
            yield from (Entry(time, process, f"{names[request.request_id]} {name}") for time in moments)


def _step_entries(story: Story, shown: Scene) -> Iterator[Entry]:
    engine = _process(story, shown.engine)
    for step in shown.steps:
        text = f"step {step.step}" + ("" if step.end_ns else ", not ended")
        yield Entry(step.start_ns, engine, text, (step.end_ns or shown.end_ns) - step.start_ns)
        if step.forward_ns[0]:
            start, end = step.forward_ns
            yield Entry(start, engine, f"step {step.step} forward", end - start)


def _message_entries(story: Story, shown: Scene) -> Iterator[Entry]:
    names = short_names(story.requests)
    for message in shown.messages:
        if message.name == "zmq.outputs_sent":
            what = f"outputs of step {message.step}"
        else:
            what = "abort" if message.req is None else f"request {names[message.req]}"
        text = f"{what} -> {_process(story, message.receiver)}"
        yield Entry(message.sent_ns, _process(story, message.sender), text, message.received_ns - message.sent_ns)
