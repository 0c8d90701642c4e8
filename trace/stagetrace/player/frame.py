"""The frame of a page that computes in a browser: the laboratory, the napkin and the pages of the book each give it their own body, style, script and data."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

from stagetrace.figures.style import KINDS, css_colours
from stagetrace.player.build import csp_hash, embedded, fill, harmless

Reach = Literal["nothing", "server", "python"]
RULES: dict[Reach, tuple[str, str]] = {
    "nothing": ("", ""),
    "server": ("", "; connect-src 'self'"),
    "python": ("'self' 'wasm-unsafe-eval' ", "; connect-src 'self'; worker-src 'self'"),
}
"""What a page may reach -> what its Content-Security-Policy says of scripts, and of the rest. A page never reaches another host."""


def framed(
    title: str, body: str, style: str, script: str, data: Any, pictures: Traversable, reach: Reach = "nothing"
) -> tuple[str, str]:
    """The page, and the Content-Security-Policy that it carries: it runs its own script and no other. `data` is JSON to the script.
    The folder `pictures` has what the body's <noscript> shows: the page while its script runs, light and dark."""
    style = _shared_style() + style
    scripts, rest = RULES[reach]
    policy = (
        f"default-src 'none'; script-src {scripts}'sha256-{csp_hash(script)}'; style-src 'sha256-{csp_hash(style)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'{rest}"
    )
    parts = {
        "TITLE": html.escape(title), "POLICY": policy, "STYLE": style, "BODY": embedded(body, pictures), "SCRIPT": script,
        "DATA": harmless(json.dumps(data)),
    }  # fmt: skip
    return fill(_read("frame.html"), parts), policy


def tokens() -> str:
    """The colours that all pages have, light and dark."""
    return _read("tokens.css")


def _shared_style() -> str:
    """The figures' colours come first, which are also the player's: what a request does looks the same everywhere."""
    colours = css_colours() | {"wait": KINDS["wait"].face}
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in colours.items())} }}\n{tokens()}{_read('frame.css')}"


def _read(name: str) -> str:
    return files("stagetrace.player").joinpath(name).read_text(encoding="utf-8")
