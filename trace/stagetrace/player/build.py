"""Puts the player's page together: template, style, scripts and recordings in one text."""

from __future__ import annotations

import base64
import hashlib
import html
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from stagetrace.figures.style import css_colours
from stagetrace.player.data import page_data
from stagetrace.read.reader import Recording, Run

PICTURE = (
    '<p>With it, the page looks like this:</p><img src="player.webp" width="1280" height="800" alt="The player in the middle of a run: the nine phases, two processes with the messages '
    'between them, the waiting queue, the running batch and its token budget, the KV-cache blocks, the requests over time">'
)
"""What the page looks like, for those without scripts; `notebooks/pictures/take.py` takes it."""
SCRIPTS = ("replay.js", "canvas.js", "timeline.js", "panels.js", "details.js", "chances.js", "tour.js", "controls.js")


def page(
    recording: str | Path | Recording | Run,
    compare: str | Path | Recording | Run | None = None,
    start: str = "",
    root: Path | None = None,
    picture: bool = True,
) -> str:
    """A whole HTML page that plays `recording`, beside `compare` if there is one, with their steps synchronised.

    `start` is where it opens, as its links say it (`step=12`, `req=r3`, `e=124`); by default at the first step with a request.
    `root` is the project's folder, for a page that stays on this machine: it links to the files in it, which others do not have.
    Without scripts it shows a `picture` of a player, except where one stands beside the page.

    It opens from a file, in a notebook and in an iframe, and loads nothing: its Content-Security-Policy forbids
    every connection and every script but its own. Raises FileNotFoundError if there is no recording, TraceError if
    it is empty, damaged or too large.
    """
    data = [page_data(one) for one in (recording, compare) if one is not None]
    data[0] |= ({"start": start} if start else {}) | ({"root": root.as_uri()} if root is not None else {})
    script = lean("\n".join(_template(name) for name in SCRIPTS))
    title = " and ".join(run["title"] for run in data)
    return assemble(
        _template("player.html"),
        title,
        _colours() + lean(_template("tokens.css") + _template("player.css")),
        script,
        pack(data),
        embedded(PICTURE, files("stagetrace.player")) if picture else "",
    )


def assemble(template: str, title: str, style: str, script: str, data: Any, picture: str = "") -> str:
    """A template with its TITLE, STYLE, SCRIPT, SCRIPT_HASH, DATA and PICTURE, each between `@@`. Whatever text the data hold, it stays data."""
    parts = {
        "TITLE": html.escape(title),
        "SCRIPT_HASH": csp_hash(script),
        "STYLE": style,
        "DATA": harmless(msgspec.json.encode(data, enc_hook=str).decode()),
        "SCRIPT": script,
        "PICTURE": picture,
    }
    return fill(template, parts)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with these parts in the place of their names, each between `@@`. Raises KeyError for a name that has no part."""
    pieces = template.split("@@")  # text, NAME, text, NAME, ...: what a client wrote is never looked at again
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def embedded(text: str, folder: Traversable) -> str:
    """HTML with the pictures in it that it names and `folder` has: a page loads nothing."""
    for file in folder.iterdir():
        if file.name.endswith(".webp") and f'"{file.name}"' in text:
            data = base64.b64encode(file.read_bytes()).decode()
            text = text.replace(f'"{file.name}"', f'"data:image/webp;base64,{data}"')
    return text


def _colours() -> str:
    """The figures' colours: a request, and what it does, look the same there and here."""
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in css_colours().items())} }}\n"


def _template(name: str) -> str:
    return files("stagetrace.player").joinpath(name).read_text(encoding="utf-8")


def pack(data: Any) -> str:
    """Data as JSON, deflated, in base64: a browser unpacks it without a library."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(data, enc_hook=str), 9)).decode()


def lean(text: str) -> str:
    """Our scripts or styles without indentation and lines of comment: who reads them reads the files, and a notebook holds the page
    once for each of its players. A comment begins and ends a line, and no text of several lines depends on how it is indented."""
    lines, inside = [], False
    for line in map(str.strip, text.splitlines()):
        inside |= line.startswith("/*")
        if line and not inside and not line.startswith("//"):
            lines.append(line)
        inside &= "*/" not in line
    return "\n".join(lines) + "\n"


def csp_hash(text: str) -> str:
    """What stands behind `sha256-` in a Content-Security-Policy that allows this script or style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def harmless(json: str) -> str:
    """The same JSON without a character that could end the element that holds it, such as in `</script>`."""
    return json.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@dataclass(frozen=True)
class Player:
    """A page for a notebook: Jupyter asks for `_repr_html_`. `height` is in CSS pixels."""

    html: str = field(repr=False)  # a notebook keeps the repr beside the HTML
    height: int = 640

    def _repr_html_(self) -> str:
        """The page in a frame of its own: its style and its keys do not touch the notebook's, nor the notebook's its."""
        source = self.html.replace("&", "&amp;").replace(
            "'", "&#39;"
        )  # between single quotes: JSON is full of double ones
        return (
            f'<iframe title="player of a recording" sandbox="allow-scripts" width="100%" height="{self.height}" '
            f"style=\"border: 1px solid #8888; border-radius: 6px\" srcdoc='{source}'></iframe>"
        )


def show(
    recording: str | Path | Recording | Run, compare: str | Path | Recording | Run | None = None, height: int = 640
) -> Player:
    """The page of `page()` for a notebook cell. Raises the same errors. Its picture stands beside the cell, where hosts of notebooks show it
    too, which leave out the page; and so a notebook holds it once."""
    return Player(page(recording, compare, picture=False), height)
