"""A path for the terminal: folded by phase, so that the whole is one screen, or every function."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePath

from stage01_cli.tools.walk.path import Path, Row
from stagetrace.read.terminal import phase_colour
from stagetrace.terminal import BOLD, DIM, RESET, shortened
from stagetrace.text import printable

PHASES = {
    1: "CLI", 2: "serve", 3: "API server", 4: "AsyncLLM", 5: "EngineCore", 6: "request", 7: "in", 8: "execution", 9: "out",
}  # fmt: skip
FOLDED_ROWS = 48  # with the headings, about 70 lines
ROOM_FOR_THE_REST = 44  # columns before the name, and behind it for the name of a file
DEEPEST = 5  # levels of calls that are indented


def lines_of(
    path: Path, phases: frozenset[int], all_rows: bool, colour: bool, columns: int | None = None, features: bool = False
) -> Iterator[str]:
    """The chosen phases, all of them if none is chosen; `all_rows`: every function, with its arguments; those of a feature are told one by
    one with `features`, else counted. In a terminal of so many `columns` a function has one line: of its file at least the name, and the
    words behind it as far as there is room."""
    rows = [row for row in path.rows if not phases or row.phase in phases]
    told = [row for row in rows if features or not row.room]
    shown = told if all_rows else most_important(told)
    width = max((len(_name(row, shown)) for row in shown), default=0)
    width = (
        width if columns is None else max(20, min(width, columns - ROOM_FOR_THE_REST))
    )  # a longer name pushes its line out
    for phase, of_phase in groupby(rows, key=lambda row: row.phase):
        in_phase = list(of_phase)
        heading = f"{phase} {PHASES.get(phase, '-')}"
        facts = "".join(f", {fact}" for fact in (f"{len(in_phase)} functions", *_steps(path, phase)))
        yield ""
        yield f"{phase_colour(phase)}{BOLD}{heading}{RESET}{facts}" if colour else heading + facts
        for lane, of_lane in groupby(in_phase, key=lambda row: row.lane):
            in_lane = list(of_lane)
            kept = [row for row in in_lane if row in shown or (all_rows and row not in told)]
            if not kept:
                continue
            arrival = f"  ── {' · '.join(lane)}{came_over(path, in_lane)}"
            yield f"{DIM}{arrival}{RESET}" if colour else arrival
            for room, stretch in groupby(kept, key=lambda row: "" if row in shown else row.room):
                if room:
                    yield f"{'':9} {'+':>5} {calls_in(list(stretch))}"
                    continue
                yield from (_fitting(_line(row, _name(row, shown), width, all_rows), row, columns) for row in stretch)
        left = sum(row in told and row not in shown for row in in_phase)
        if left:
            yield f"       ... and {left} more, with --all"
        folded = [row for row in in_phase if row not in told]
        if folded and not all_rows:
            yield f"       + {calls_in(folded)}, with --features"


def calls_in(rows: list[Row]) -> str:
    """Functions of features, folded; what was running already went on once at least."""
    calls, rooms = sum(max(1, row.calls) for row in rows), dict.fromkeys(row.room for row in rows)
    return f"{calls} call{'s' * (calls > 1)} in {', '.join(rooms)}"


def _line(row: Row, name: str, width: int, all_rows: bool) -> str:
    calls = f"×{row.calls}" if row.calls else "↻"
    words = f"{row.at / 1e6:9.1f} {calls:>5} {name:{width}}  {row.function.file}:{row.function.line}"
    if row.events:
        words += f"  {', '.join(Counter(event.name for event in row.events))}"
    if said := _said(row, all_rows):
        words += f"  ({', '.join(said)})"
    if all_rows and row.result not in ("", "None"):
        words += f" -> {row.result}"
    return printable(words)


def _fitting(line: str, row: Row, columns: int | None) -> str:
    """The line in a terminal of so many columns: of its file the name, if the folders have no room."""
    if columns is None or len(line) <= columns:
        return line
    file = row.function.file
    return shortened(line.replace(f"{file}:", f"{PurePath(file).name}:", 1), columns)


def _said(row: Row, all_rows: bool) -> list[str]:
    """The arguments; folded, at most two that tell a shape or a count, tensors first."""
    given = row.arguments
    if all_rows:
        return [f"{name}={value}" for name, value in given.items()]
    telling = [name for name, value in given.items() if "[" in value or "num_" in value or "num_" in name]
    telling.sort(key=lambda name: not is_tensor(given[name]))
    return [f"{name}={given[name]}" for name in telling[:2]]


def _name(row: Row, shown: list[Row]) -> str:
    """Indented below the callers that are shown."""
    depth, above = 0, row.caller
    while above is not None:
        depth += above in shown and above.lane == row.lane and above.phase == row.phase
        above = above.caller
    return "  " * min(depth, DEEPEST) + row.function.name


def most_important(rows: list[Row], most: int = FOLDED_ROWS) -> list[Row]:
    """Those that say most about where the run is: they emit events, call much, do much. Each phase keeps its share."""
    weights = _weights(rows)
    ranked = sorted(rows, key=weights.__getitem__, reverse=True)
    phases = {row.phase for row in rows}
    share = 2 * most // (3 * len(phases) or 1)
    chosen = {row for phase in phases for row in [row for row in ranked if row.phase == phase][:share]}
    for row in ranked:
        if len(chosen) < most:
            chosen.add(row)
    return [row for row in rows if row in chosen]


def _weights(rows: list[Row]) -> dict[Row, float]:
    """What a helper for the trace emits tells about the function that called it."""
    weights: dict[Row, float] = defaultdict(float)
    for row in rows:
        last = row.function.name.rpartition(".")[2]
        teller = row.caller if "trace" in last and row.caller is not None else row
        weights[teller] += 60 * bool(row.events)
        plugs_in = any(part in row.function.file for part in ("/features/", "/backends/", "/args/", "/hooks.py"))
        tensors = any(map(is_tensor, row.arguments.values()))
        weights[row] += min(len(row.lines), 20) - 60 * plugs_in - 10 * last.startswith("_") + 30 * tensors
        above = row.caller
        while above is not None:
            weights[above] += 0.5
            above = above.caller
    return weights


def is_tensor(words: str) -> bool:
    """f32[4, 256] is one, list[4] is not."""
    return "[" in words and words.partition("[")[0].rstrip("0123456789") in ("f", "bf", "i", "u", "bool")


def _steps(path: Path, phase: int) -> list[str]:
    """How many tokens the engine's steps computed: `4 tokens, then 7 × 1 token`."""
    sizes = [event.args["total_tokens"] for event in path.events if event.name == "sched.output"]
    if phase != 8 or not sizes:
        return []
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    parts = [f"{f'{times} × ' if times > 1 else ''}{size} token{'s' * (size > 1)}" for size, times in runs]
    return [f"{len(sizes)} step{'s' * (len(sizes) > 1)} of the engine, folded: {', then '.join(parts[:4])}"]


def came_over(path: Path, rows: list[Row]) -> str:
    """How the run came into this lane: the first message from another process that was received here."""
    sent = {event.ref: event for event in path.events}
    received = sorted(
        (event for row in rows for event in row.events if event.cause in sent), key=lambda event: event.ts
    )
    for event in received:
        cause = sent[str(event.cause)]
        if cause.pid != event.pid:
            return f" ◀─ {cause.proc}: {cause.name} ─▶ {event.name}, {(event.ts - cause.ts) / 1e6:.1f} ms"
    return ""
