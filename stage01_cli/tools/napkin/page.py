"""Puts the napkin's page together: one file that opens from a disk, computes in the browser, and loads nothing."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files

from stage01_cli.tools.napkin.command import NUMBERS
from stage01_cli.tools.napkin.facts import CHIPS, MODELS, WALLS
from stagetrace.player.frame import framed


def build_page() -> str:
    """The page, with a Content-Security-Policy under which it runs its own script and asks nobody."""
    script = read_static("arithmetic.js") + "\n" + read_static("napkin.js")
    data = {
        "models": {name: asdict(model) for name, model in MODELS.items()}, "model": "Llama-2-7B",
        "chips": {name: asdict(chip) for name, chip in CHIPS.items()}, "chip": "H100",
        "numbers": {flag: numbers[:3] for flag, numbers in NUMBERS.items()}, "walls": WALLS,
    }  # fmt: skip
    folder = files("stage01_cli.tools.napkin").joinpath("static")
    return framed("The napkin", read_static("napkin.html"), read_static("napkin.css"), script, data, folder)[0]


def read_static(name: str) -> str:
    """One of the files in static/."""
    return files("stage01_cli.tools.napkin").joinpath("static", name).read_text(encoding="utf-8")
