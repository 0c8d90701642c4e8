"""What bars somebody's way on a page who cannot see it, or not well, or has a telephone: axe-core, of the package axe-playwright-python. And what is
left of a page for those without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCHEMES, WIDTHS = ("light", "dark"), (1280, 390)
SERIOUS = """() => axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) =>
  violations.filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html }) => html.slice(0, 100)).join("  ")}`))"""


IS_THERE = "image => image.complete && image.naturalWidth > 600"


def axe_source() -> str:
    """The script, as text."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def on_page(page: Any, source: str) -> list[str]:
    """What axe finds serious or critical on an open page, light and dark, wide and narrow; and whether it is wider than the window."""
    page.evaluate(source)
    found = []
    for scheme in SCHEMES:
        for width in WIDTHS:
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.set_viewport_size({"width": width, "height": 900})
            lines = page.evaluate(SERIOUS)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"):
                lines.append("wider than the window")
            found += [f"{page.url}, {scheme}, {width}: {line}" for line in lines]
    return found


def without_scripts(browser: Any, addresses: list[str]) -> Iterator[tuple[str, list[str], str]]:
    """What each page shows where scripts are off: its address, the alternative texts of its pictures that can be seen, its words."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    for address in addresses:
        page.goto(address)
        seen = [one for one in page.locator("img").all() if one.is_visible() and one.evaluate(IS_THERE)]
        yield address, [one.get_attribute("alt") or "" for one in seen], page.locator("body").inner_text()
    context.close()
