"""`show RUN`: the requests of a recording; with `--req` the story of one, from the HTTP byte to the last chunk."""

from __future__ import annotations

import argparse
import sys

from stagetrace.commands.common import add_run, open_recording
from stagetrace.event import Event
from stagetrace.ids import is_beam, root_of
from stagetrace.read.bounded import tell_bounded
from stagetrace.read.latency import PARTS, Latency, of_request
from stagetrace.read.narrative import Line, Narrator
from stagetrace.read.reader import Recording
from stagetrace.read.selection import pick_request
from stagetrace.read.story import RequestStory, Story
from stagetrace.read.terminal import add_colour, ascii_if_needed, milliseconds, phase_colour, short_id, table
from stagetrace.terminal import BOLD, is_terminal, painted, wants_colour, width_of_output
from stagetrace.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, and which request."""
    add_run(parser)
    parser.add_argument(
        "--req", metavar="ID", help="the request: its id, the short one from the list, or any part that no other has"
    )
    add_colour(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list, or the story."""
    recording = open_recording(args.run)
    if args.req is None:
        _print_list(recording)
    else:
        ids = dict.fromkeys(event.req for event in recording if event.req is not None)
        _print_story(recording, pick_request(args.req, ids), wants_colour(args.color))
    return 0


def _print_list(recording: Recording) -> None:
    start = recording.start_ns()
    rows: list[tuple[int, list[str]]] = []

    def ended(request: RequestStory) -> None:
        if is_beam(request.request_id):  # a part of the request that searches
            return
        latency = of_request(request)
        rows.append((latency.arrival_ns, _row(request, latency, start)))

    tell_bounded(recording, ended)
    head = ["request", "at ms", "prompt", "cached", "output", "preempted", "TTFT ms", "TPOT ms", "end", "id"]
    rows.sort(key=lambda row: row[0])
    shown = table(head, [cells for _, cells in rows], left=(0, 8, 9))
    if is_terminal(sys.stdout) and max(map(len, shown.splitlines())) > width_of_output():  # the short name finds it too
        shown = table(head[:-1], [cells[:-1] for _, cells in rows], left=(0, 8))
    print(shown if rows else "no request in this recording")


def _row(request: RequestStory, latency: Latency, start: int) -> list[str]:
    if children := request.delivery.children:
        end = f"-> {len(children)} requests"
    else:
        end = _end(request)
    prompt = str(request.num_prompt_tokens or "-")
    output = max(request.num_output_tokens, latency.num_tokens)  # the engine's events may be lost
    return [
        short_id(request.request_id), f"{(latency.arrival_ns - start) / 1e6:.1f}", prompt,
        str(request.num_cached_tokens), str(output), str(request.num_preemptions), milliseconds(latency.ttft_ns), milliseconds(latency.tpot_ns), end, printable(request.request_id),
    ]  # fmt: skip


def _end(request: RequestStory) -> str:
    """How it ended, as far as was recorded."""
    ends = {
        "request.refused": "refused",
        "request.aborted": "aborted",
        "grammar.refused": "refused",
        "router.received": "routed",
    }
    for name, word in ends.items():
        if name in request.first:
            return word
    return request.reason or ("finished" if "request.finished" in request.first else "not recorded")


def _print_story(recording: Recording, request_id: str, colour: bool) -> None:
    start = recording.start_ns()
    story, narrator = Story(on_step=lambda step: None), Narrator(request_id)
    lines: list[Line] = []
    texts: dict[str, str] = {}
    for event in recording:
        if event.req is None or root_of(event.req) == root_of(request_id):
            story.feed(event)
            lines += narrator.feed(event)
            _collect_texts(event, request_id, texts)
    lines += narrator.finish()
    _print_summary(story.requests[request_id], texts, colour)
    zero = lines[0].start_ns if lines else start
    print(f"\nits first event is {(zero - start) / 1e6:.3f} ms after the recording's start; times in ms from there")
    process = ""
    for line in lines:
        if line.process and line.process != process:
            process = line.process
            print(ascii_if_needed(painted(f"── {printable(process)}", BOLD, colour)))
        print(ascii_if_needed(_line(line, zero, colour)))


def _line(line: Line, zero: int, colour: bool) -> str:
    time = f"{(line.start_ns - zero) / 1e6:10.3f}"
    until = f" … {(line.end_ns - zero) / 1e6:.3f}" if line.end_ns > line.start_ns else ""
    phase = painted(str(line.phase), phase_colour(line.phase), colour)
    return f"{time}{until:<12}  {phase}  {printable(line.text)}"


def _print_summary(request: RequestStory, texts: dict[str, str], colour: bool) -> None:
    latency = of_request(request)
    title = f"request {short_id(request.request_id)} ({printable(request.request_id)})"
    print(painted(title, BOLD, colour))
    for name, text in texts.items():
        print(f"  {name}: {printable(text)}")
    cached = f", {request.num_cached_tokens} found in the prefix cache" if request.num_cached_tokens else ""
    preempted = f", preempted {request.num_preemptions} times" if request.num_preemptions else ""
    output = max(request.num_output_tokens, latency.num_tokens)
    print(
        f"  prompt {request.num_prompt_tokens or '?'} tokens{cached}; output {output} tokens{preempted}; end: {_end(request)}"
    )
    if request.delivery.children:
        print(
            f"  it became {len(request.delivery.children)} more requests: {', '.join(map(short_id, request.delivery.children))}"
        )
    for name, whole, parts in (("TTFT", latency.ttft_ns, latency.ttft), ("TPOT", latency.tpot_ns, latency.tpot)):
        if whole is not None:
            shown = [f"{part.name} {milliseconds(parts[part.name])}" for part in PARTS if part.name in parts]
            print(f"  {name} {milliseconds(whole)} ms = {' + '.join(shown)}")


def _collect_texts(event: Event, request_id: str, texts: dict[str, str]) -> None:
    """The prompt and the output, in recordings made with --trace-prompts. The answers to one prompt share it."""
    prompt, text = event.args.get("prompt"), event.args.get("text")
    if isinstance(prompt, str) and event.req is not None and request_id.endswith(event.req):
        texts["prompt"] = prompt
    if isinstance(text, str) and event.req == request_id:
        texts["output"] = texts.get("output", "") + text
