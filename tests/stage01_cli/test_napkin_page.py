"""The napkin's page in a real browser: its arithmetic is that of Python to the bit, it shows what that says, everything on it can be
reached by keys and has a name, and it asks nobody."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from test_napkin import GRID

from stage01_cli.tools.napkin.arithmetic import Chip, Load, napkin
from stage01_cli.tools.napkin.command import NUMBERS
from stage01_cli.tools.napkin.facts import CHIPS, MODELS
from stage01_cli.tools.napkin.page import build_page

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py

RESULT = """() => Object.fromEntries([...document.querySelectorAll("#result div, #parts div")].map(
  pair => [pair.querySelector("dt").textContent, pair.querySelector("dd").textContent]))"""

NAPKINS = """cases => "[" + JSON.parse(cases).map(([model, chip, load]) => "{" + Object.entries(napkin(model, chip, load)).map(
  ([name, value]) => `"${name}": ${typeof value === "string" ? JSON.stringify(value) : value}`) + "}") + "]" """
"""As text, which Playwright carries faster; Python's JSON knows Infinity."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("napkin") / "napkin.html"
    path.write_text(build_page(), encoding="utf-8")
    return path.as_uri()


class Page:
    """The page, open from the disk. Nothing may go wrong in it, and it may load nothing but itself."""

    def __init__(self, browser: Any, url: str, width: int = 1280) -> None:
        self.url = url
        self.context = browser.new_context(viewport={"width": width, "height": 900})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.problems: list[str] = []
        self.asked: set[str] = set()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.load()

    def load(self) -> None:
        self.page.goto(self.url)
        self.page.wait_for_selector("body[data-ready]")

    @property
    def shown(self) -> dict[str, str]:
        found: dict[str, str] = self.page.evaluate(RESULT)
        return found

    def text(self, selector: str) -> str:
        found: str = self.page.text_content(selector)
        return found

    def close(self) -> None:
        self.context.close()
        assert self.problems == []
        assert {each for each in self.asked if not each.startswith("data:")} == {self.url}


@pytest.fixture(scope="module")
def sheet(browser: Any, url: str) -> Iterator[Page]:
    page = Page(browser, url)
    yield page
    page.close()


@pytest.fixture
def opened(sheet: Page) -> Page:
    """Loaded anew: a page of its own for each test would cost as much again."""
    sheet.load()
    return sheet


def test_the_page_computes_what_python_computes(opened: Page) -> None:
    cases = json.dumps([[dataclasses.asdict(part) for part in case] for case in GRID])
    found = json.loads(opened.page.evaluate(NAPKINS, cases))
    for case, got in zip(GRID, found, strict=True):
        assert got == dataclasses.asdict(napkin(*case)), case
    too_long = [dataclasses.asdict(part) for part in (MODELS["gpt2"], CHIPS["H100"], Load(1000, 25, 0.05))]
    with pytest.raises(ValueError) as refused:
        napkin(MODELS["gpt2"], CHIPS["H100"], Load(1000, 25, 0.05))
    said = "given => { try { napkin(...given) } catch (error) { return error.message } }"
    assert opened.page.evaluate(said, too_long) == str(refused.value)


def test_it_shows_the_napkin_of_what_is_given(opened: Page) -> None:
    opened.page.select_option("#model", "Llama-3.1-8B")
    opened.page.select_option("#chip", "H200")
    opened.page.select_option("#kv_bytes", "1")
    for name, value in (("prompt", "2000"), ("answer", "300"), ("tpot-ms", "20"), ("price", "4.5"), ("reach", "60")):
        opened.page.fill(f"#{name}", value)
    found = napkin(MODELS["Llama-3.1-8B"], CHIPS["H200"], Load(2000, 300, 0.02, kv_bytes=1, price=4.5, reach=0.6))
    shown = opened.shown
    assert shown["users"] == f"{found.users:,}" and shown["weights"] == f"{found.weight_bytes / 1e9:.1f} GB"
    assert float(shown["a million tokens cost"]) == pytest.approx(found.cost, rel=0.01)
    assert float(shown["TPOT"].split()[0]) == pytest.approx(found.tpot * 1e3, rel=0.01)
    assert opened.text("#wall").startswith(f"{found.users:,} users. The wall is {found.wall}: ")
    walls = opened.page.evaluate("() => [...document.querySelectorAll('#walls b')].map(each => each.textContent)")
    assert walls == [f"{getattr(found, f'{name}_wall'):,}" for name in ("memory", "bandwidth", "arithmetic")]
    assert opened.text("#walls .lowest span") == found.wall
    assert f"{found.users:,} users" in opened.page.get_attribute("#chart svg", "aria-label")


def test_a_chip_of_ones_own(opened: Page) -> None:
    for name, value in (("memory", "24"), ("bandwidth", "20"), ("arithmetic", "0.1")):
        opened.page.fill(f"#chip-{name}", value)
    opened.page.select_option("#model", "gpt2")
    assert opened.page.input_value("#chip") == "your own"
    found = napkin(MODELS["gpt2"], Chip("your own", 24e9, 20e9, 0.1e12), Load(512, 256, 0.05, price=3))
    assert opened.shown["users"] == f"{found.users:,}" and f"The wall is {found.wall}" in opened.text("#wall")
    opened.page.select_option("#chip", "A100")
    assert opened.page.input_value("#chip-bandwidth") == "2040", "a known chip shows its numbers again"


def test_sliders_move_by_keys_and_say_their_number(opened: Page) -> None:
    before = int(opened.shown["users"])
    opened.page.focus("#prompt-range")
    opened.page.keyboard.press("PageUp")
    number = int(opened.page.input_value("#prompt"))
    assert number > 512 == NUMBERS["prompt"][2] and int(opened.shown["users"]) < before
    assert opened.page.get_attribute("#prompt-range", "aria-valuetext") == str(number)
    opened.page.keyboard.press("Home")
    assert opened.page.input_value("#prompt") == "1"
    opened.page.keyboard.press("End")
    assert opened.page.input_value("#prompt") == f"{NUMBERS['prompt'][1]}"
    opened.page.fill("#prompt", "64")
    assert opened.page.get_attribute("#prompt-range", "aria-valuetext") == "64"


def test_what_is_wrong_is_said_in_one_line(opened: Page) -> None:
    opened.page.fill("#tpot-ms", "0")
    assert opened.text("#problem") == "promised TPOT, ms must be from 1 to 1,000."
    assert opened.page.get_attribute("#tpot-ms", "aria-invalid") == "true" and not opened.page.is_visible("#result")
    opened.page.fill("#tpot-ms", "50")
    opened.page.fill("#prompt", "5000")
    assert opened.text("#problem") == "The context of Llama-2-7B ends at 4,096 tokens: lower prompt or answer."
    opened.page.select_option("#model", "Llama-3.1-70B")
    assert opened.text("#problem") == "" and opened.text("#wall") == (
        "0 users. The wall is memory: not even one context fits beside the weights."
    )
    assert opened.shown["TPOT"] == opened.shown["a million tokens cost"] == "–"


def test_everything_has_a_name_and_can_be_reached(opened: Page) -> None:
    controls = "#given input, #given select"
    nameless = opened.page.evaluate(
        f"() => [...document.querySelectorAll('{controls}')].filter(e => !e.labels?.length && !e.getAttribute('aria-label')).length"
    )
    assert nameless == 0
    opened.page.focus("#model")
    reached = {opened.page.evaluate("() => document.activeElement.id")}
    for _ in range(opened.page.locator(controls).count() - 1):
        opened.page.keyboard.press("Tab")
        reached.add(opened.page.evaluate("() => document.activeElement.id"))
    assert len(reached) == opened.page.locator(controls).count() and "" not in reached
    assert opened.page.get_attribute("#chart svg", "role") == "img"


@pytest.mark.slow(keep="360")
@pytest.mark.parametrize("width", [360, 700, 1600])
def test_it_fits_every_width(width: int, browser: Any, url: str) -> None:
    page = Page(browser, url, width)
    page.page.select_option("#model", "gpt2")
    assert page.page.evaluate("() => document.documentElement.scrollWidth") <= width
    smallest = page.page.evaluate(
        "() => Math.min(...[...document.querySelectorAll('#chart text')].map(e => e.getBoundingClientRect().height))"
    )
    assert smallest > 9, "the chart's words keep their size"
    page.close()


@pytest.mark.slow
def test_its_policy_lets_nothing_in(url: str) -> None:
    page = build_page()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
