"""A path as one HTML page: the source with the executed lines marked, the path beside it, and keys to step through."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from typing import Any

from stage01_cli.tools.walk.notes import ROOT
from stage01_cli.tools.walk.path import Path, Row
from stage01_cli.tools.walk.text import PHASES, came_over
from stagetrace.player.build import assemble, embedded
from stagetrace.player.frame import tokens
from stagetrace.vocabulary import VOCABULARY


def page_of(path: Path, title: str, phases: frozenset[int]) -> str:
    """The whole page as text; with `phases` only their functions and files. It loads nothing, and source is data to it."""
    rows = [row for row in path.rows if not phases or row.phase in phases]
    folder = files("stage01_cli.tools.walk")
    html, css, js = ((folder / f"walk.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return assemble(embedded(html, folder), title, tokens() + css, js, _data(path, rows, title))


def _data(path: Path, rows: list[Row], title: str) -> dict[str, Any]:
    """`rows` point into `files` and `lanes`, and to their caller's row (-1: none)."""
    names = sorted({row.function.file for row in rows})
    lanes = list(dict.fromkeys(row.lane for row in rows))
    places = {row: place for place, row in enumerate(rows)}
    return {
        "title": title,
        "phases": {phase: PHASES.get(phase, "-") for phase in sorted({row.phase for row in rows})},
        "files": [{"name": name, "text": _source(name), "ran": sorted(path.lines[name])} for name in names],
        "lanes": [" · ".join(lane) for lane in lanes],
        "arrivals": _arrivals(path, rows),
        "meanings": {event.name: VOCABULARY[event.name].meaning for row in rows for event in row.events},
        "rows": [
            {
                "name": row.function.name, "file": names.index(row.function.file), "line": row.function.line,
                "last": row.function.last, "room": row.room, "phase": row.phase, "lane": lanes.index(row.lane),
                "at": round(row.at / 1e6, 1), "calls": row.calls, "caller": _caller(row, places),
                "arguments": row.arguments, "result": row.result,
                "events": Counter(event.name for event in row.events),
            }
            for row in rows
        ],
    }  # fmt: skip


def _source(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _caller(row: Row, places: dict[Row, int]) -> int:
    """The place of the nearest function above that is on the page."""
    above = row.caller
    while above is not None and above not in places:
        above = above.caller
    return -1 if above is None else places[above]


def _arrivals(path: Path, rows: list[Row]) -> dict[int, str]:
    """Place of a lane's first row in a phase -> how the run came there, if it was a message from another process."""
    found: dict[int, str] = {}
    place = 0
    while place < len(rows):
        key = rows[place].phase, rows[place].lane
        end = next((at for at in range(place, len(rows)) if (rows[at].phase, rows[at].lane) != key), len(rows))
        if text := came_over(path, rows[place:end]):
            found[place] = text.strip()
        place = end
    return found
