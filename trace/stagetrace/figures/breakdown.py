"""Where the time of each request went, from its HTTP request to its last token at the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagetrace.figures.names import columns, drawn_names, milliseconds, plural, short_names
from stagetrace.figures.style import INK, KINDS, Box, Look, boxes, legend, new_figure, note, row_labels, write
from stagetrace.ids import is_beam
from stagetrace.read.latency import PARTS, Latency, of_request
from stagetrace.read.story import Story

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {
    "http": Look("#009e73", "ooo", "white"),
    "tokenize": Look("#f0e442", "---"),
    "ipc in": Look("#cc79a7", "///"),
    "grammar": Look("#cc79a7", "..."),
    "queue": KINDS["wait"],
    "prefill": KINDS["prefill"],
    "preempted": KINDS["preempted"],
    "decode": KINDS["decode"],
    "ipc out": Look("#e69f00", "\\\\\\"),
    "detokenize": Look("#f0e442", "|||"),
    "response": Look("#009e73", "+++", "white"),
    "unrecorded": Look("#ffffff", "/"),
}
FIRST_TOKEN = {"first token at the client (TTFT)": ("D", "white")}


def answered(story: Story) -> list[Latency]:
    """The latencies of all requests whose tokens reached the client, in the order of arrival."""
    latencies = (of_request(each) for each in story.requests.values() if not is_beam(each.request_id))
    return sorted((one for one in latencies if one.ttft_ns is not None), key=lambda one: one.arrival_ns)


def pieces(latency: Latency) -> list[tuple[str, int]]:
    """(part, nanoseconds): first the cost of the first token, part by part, then that of all others. Their sum is the time
    until the last token."""
    return [
        (part.name, split[part.name]) for split in (latency.ttft, latency.gaps) for part in PARTS if part.name in split
    ]


def latency_breakdown(story: Story) -> Figure:
    """A bar per request as long as its client waited: up to the mark for the first token, after it for the others, each divided by
    where the awaited token was (`stagetrace.read.latency`). Raises TraceError without matplotlib."""
    latencies, names = answered(story), drawn_names(story.requests)
    height = min(max(0.3 * len(latencies), 0.7), 11)
    title = f"What {plural(len(latencies), 'request')} waited for"
    figure, (axes,) = new_figure(height + 1.6, title=title + ", summed up by cause before and after the first token")
    if not latencies:
        note(figure, "The recording holds no token that reached a client.")
        return figure
    longest = max(sum(time for _, time in pieces(latency)) for latency in latencies) or 1
    places: dict[str, list[Box]] = {}
    for y, latency in enumerate(latencies):
        left = 0.0
        for part, time in pieces(latency):
            places.setdefault(part, []).append((left / 1e6, y - 0.38, time / 1e6, 0.76))
            text = f"{time / 1e6:.1f}" if time < 1e8 else f"{time / 1e6:.0f}"
            if time / longest > 0.011 * len(text) and len(latencies) <= 60:
                write(axes, (left + time / 2) / 1e6, y, text, min(8.0, height * 40 / len(latencies)), LOOKS[part])
            left += time
    for part, rectangles in places.items():
        boxes(axes, rectangles, LOOKS[part], plain=len(latencies) > 60)
    firsts = [(latency.ttft_ns or 0) / 1e6 for latency in latencies]
    axes.plot(
        firsts, range(len(firsts)), "D", color="white", markeredgecolor=INK, markersize=6 if len(firsts) <= 60 else 3
    )
    row_labels(axes, [names[latency.request_id] for latency in latencies], height)
    axes.set_xlim(0, longest / 1e6 * 1.02)
    axes.set_xlabel("ms since the HTTP request came (numbers in the bars: ms)", fontsize=9, color=INK)
    shown = {part.name: LOOKS[part.name] for part in PARTS if part.name in places}
    legend(axes, shown, FIRST_TOKEN, plain=len(latencies) > 60)
    return figure


def latency_breakdown_table(story: Story) -> str:
    """Two lines per request, the waits for its first token and for all others: tokens, milliseconds, and those of each part."""
    latencies, names = answered(story), short_names(story.requests)
    used = [part.name for part in PARTS if any(part.name in {**one.ttft, **one.gaps} for one in latencies)]
    rows = []
    for one in latencies:
        splits = [("first", 1, one.ttft_ns or 0, one.ttft)]
        if one.gaps_ns is not None:
            splits.append(("others", one.num_tokens - 1, one.gaps_ns, one.gaps))
        for which, count, whole, split in splits:
            parts = [milliseconds(split[part]) if part in split else "" for part in used]
            rows.append([names[one.request_id], which, str(count), milliseconds(whole), *parts])
    return columns(["request", "wait for", "tokens", "ms", *used], rows)
