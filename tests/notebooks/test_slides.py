"""Slides of a notebook: one file that asks for nothing else, in a real browser."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
import build  # noqa: E402
import slides  # noqa: E402

pytest_plugins = ["browser"]


@pytest.mark.parametrize("source", build.sources(), ids=lambda path: path.stem)
def test_slides_of_each_notebook_hold_what_it_shows(source: Path) -> None:
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    bodies = slides.slides(notebook)
    text = "\n".join(bodies)
    headings = [
        line
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if re.match("#{1,2} ", line)
    ]
    assert len(bodies) >= len(headings)
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    stills = [
        still
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for still in re.findall(r"!\[|<img ", cell.source)
    ]
    assert text.count("<img ") == len(pictures) + len(stills) and all(
        picture.strip() for picture in re.findall(r'<img alt="([^"]*)"', text)
    )
    assert not re.search(r'(src|href)="(https?:)?//', re.sub(r"<a [^>]*>", "", slides.page(notebook))), (
        "it loads nothing"
    )


def test_an_answer_is_not_on_the_slide_of_its_question() -> None:
    make = nbformat.v4
    question = make.new_markdown_cell("> **Predict.** How many?", metadata={"tags": ["predict"]})
    guess = make.new_code_cell("lab.predict(many=None)", metadata={"tags": ["predict"]})
    hidden = make.new_code_cell(
        "print(6 * 7)", outputs=[make.new_output("stream", name="stdout", text=slides.COVER + "42\n")]
    )
    hidden.metadata["jupyter"] = {"outputs_hidden": True}
    cells = [
        make.new_markdown_cell("# Title"),
        make.new_code_cell("setup"),
        question,
        guess,
        hidden,
        make.new_markdown_cell("So 42 < 43."),
    ]
    title, asked, answer = slides.slides(make.new_notebook(cells=cells))
    assert "Title" in title and "setup" not in title and "How many" in asked and "42" not in asked
    assert "lab.predict" not in asked + answer and slides.COVER.strip() not in answer
    assert '<details><summary>What it is</summary><pre class="out">42</pre></details>' in answer


def test_links_lead_from_the_folder_of_the_slides() -> None:
    text = '<a href="../stage03_engine/llm.py">x</a><a href="05_engine_core.ipynb">y</a><a href="https://x.org">z</a><a href="#a">a</a>'
    found = re.findall('href="([^"]+)"', slides._links(text))
    assert found == ["../../stage03_engine/llm.py", "05_engine_core.html", "https://x.org", "#a"]


def test_in_a_browser_every_picture_is_there_and_nothing_is_loaded(browser: Any, tmp_path: Path) -> None:
    (source,) = [path for path in build.sources() if path.stem == "18_metrics"]
    made = slides.write(source, tmp_path / "slides")
    page, trouble = browser.new_page(), []
    page.on(
        "request",
        lambda request: trouble.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
    )
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.goto(made.as_uri())
    count = page.evaluate("all.length")
    assert page.evaluate("[...document.images].map(image => image.naturalWidth)") and not trouble
    assert all(page.evaluate("[...document.images].map(image => image.naturalWidth)"))
    assert page.evaluate("document.querySelectorAll('section.now').length") == 1
    page.keyboard.press("ArrowRight")
    assert page.evaluate("at") == 1 and page.evaluate("location.hash") == "#2"
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("at") == count - 1
    page.emulate_media(media="print")
    assert page.evaluate(
        "[...document.querySelectorAll('section')].every(one => getComputedStyle(one).display === 'block')"
    )
    page.close()
