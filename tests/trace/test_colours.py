"""One colour for each state and each request, in all pictures and on all pages: the table is in figures/style.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagetrace.figures.style import KINDS, css_colours, request_look
from stagetrace.player.build import page

ROOT = Path(__file__).parent.parent.parent
HOUSE = [
    ROOT / name for name in ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "trace", "notebooks")
]
PAGES = sorted(path for house in HOUSE for kind in ("css", "js", "html") for path in house.rglob(f"*.{kind}"))
VARIABLE = re.compile(r"--([a-z][a-z0-9-]*): *(#[0-9a-fA-F]{3,8})\b")
COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b|\btab:[a-z]+")


def strangers(text: str) -> list[str]:
    """What a page says of the common colours otherwise than the table: a variable with another colour, or a colour without its variable."""
    table = css_colours()
    defined = VARIABLE.findall(text)
    wrong = [f"--{name}: {colour}" for name, colour in defined if table.get(name, colour).lower() != colour.lower()]
    literal = COLOUR.findall(VARIABLE.sub("", text))
    return wrong + [colour for colour in literal if colour.lower() in table.values()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_the_colours_of_the_figures(path: Path) -> None:
    assert not strangers(path.read_text(encoding="utf-8"))


def test_the_pages_are_looked_at() -> None:
    assert {"page.css", "player.css"} <= {path.name for path in PAGES}
    page_css = (ROOT / "stage02_server/features/page/static/page.css").read_text(encoding="utf-8")
    hues = {name for name, _ in VARIABLE.findall(page_css)} & css_colours().keys()
    assert len(hues) == 7, "six requests, whose colours come back with patterns, and preempted, which is none of theirs"


def test_the_player_has_the_colours_of_the_figures() -> None:
    built = dict(VARIABLE.findall(page(ROOT / "trace/recorded/one_request")))
    assert {name: built[name] for name in css_colours()} == css_colours()
    assert css_colours()["preempted"] == KINDS["preempted"].face and css_colours()["hue-1"] == request_look(1).face


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_a_notebook_names_states_and_not_colours(path: Path) -> None:
    assert not COLOUR.findall(path.read_text(encoding="utf-8"))


def test_another_colour_is_noticed() -> None:
    assert strangers("--prefill: #0072B3;") == ["--prefill: #0072B3"]
    assert strangers("a { color: #0072b2 }") == ["#0072b2"]
    assert not strangers(":root { --prefill: #0072b2; --soft: #57606a } a { color: var(--prefill); border: #343c46 }")
