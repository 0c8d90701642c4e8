"""Puts the napkin's page together: one file that opens from a disk, computes in the browser, and loads nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files

from stage01_cli.tools.napkin.command import NUMBERS
from stage01_cli.tools.napkin.facts import CHIPS, MODELS, WALLS
from stagetrace.figures.style import css_colours
from stagetrace.player.build import csp_hash, fill, harmless


def build_page() -> str:
    """The page, with a Content-Security-Policy under which it runs its own script and asks nobody."""
    script = read_static("arithmetic.js") + "\n" + read_static("napkin.js")
    colours = " ".join(f"--{name}: {colour};" for name, colour in css_colours().items())
    style = f":root {{ {colours} }}\n{read_static('napkin.css')}"
    data = {
        "models": {name: asdict(model) for name, model in MODELS.items()}, "model": "Llama-2-7B",
        "chips": {name: asdict(chip) for name, chip in CHIPS.items()}, "chip": "H100",
        "numbers": {flag: numbers[:3] for flag, numbers in NUMBERS.items()}, "walls": WALLS,
    }  # fmt: skip
    policy = (
        f"default-src 'none'; script-src 'sha256-{csp_hash(script)}'; style-src 'sha256-{csp_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"STYLE": style, "DATA": harmless(json.dumps(data)), "SCRIPT": script, "POLICY": policy}
    return fill(read_static("napkin.html"), parts)


def read_static(name: str) -> str:
    """One of the files in static/."""
    return files("stage01_cli.tools.napkin").joinpath("static", name).read_text(encoding="utf-8")
