"""The book: everything there is to read is in it once, its links lead somewhere, and it is made of nothing but the project.

`-m long` builds it, follows every link, and opens every page in Chromium. It needs what `make book` installs; BOOK_DIR names a book that is made already.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given, strategies as st

from stage01_cli.main import main
from stage01_cli.tools.book import build
from stage01_cli.tools.book.asides import aside_of, asides
from stage01_cli.tools.book.build import write_tree
from stage01_cli.tools.book.chapters import ROOT, parts, walk_modules
from stage01_cli.tools.book.links import LINK, rewrite
from stage01_cli.tools.book.quiz import questions
from stage01_cli.tools.book.reference import module_page

pytest_plugins = ["browser"]
NOT_IN_IT = {"AGENTS.md"}  # for those who work on the project
MEGABYTES = 40
MEGABYTES_OF_LAB = 24  # Pyodide, its wheels and the laboratory, only with --pyodide


def test_every_text_is_in_it_once() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.md", "*.ipynb"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a checkout")
    there = {path for path in tracked.stdout.split() if not path.startswith(".")} - NOT_IN_IT
    chapters = [path.as_posix() for _, found in parts() for path in found]
    assert sorted(chapters) == sorted(there)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book") / "tree"
    write_tree(folder)
    return folder


def test_what_is_named_of_the_code_is_there(tree: Path) -> None:
    """`source:PATH#L52` names a file of the project that has so many lines."""
    found = 0
    for page in tree.rglob("*.md"):
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            if link.startswith("source:"):
                name, _, place = link.removeprefix("source:").partition("#")
                assert (ROOT / name).exists(), (page, link)
                if place.startswith("L"):
                    assert int(place[1:]) <= len((ROOT / name).read_text(encoding="utf-8").splitlines()), (page, link)
                found += 1
    assert found > 1000


def test_code_and_links_among_chapters_stay_as_they_are() -> None:
    text = "[a](b.md) [c](../stage03_engine/errors.py#L3)\n```\n[c](../stage03_engine/errors.py)\n```\n[d](https://x.y/z) [e](#f) [g](../stage03_engine)\n"
    chapters = {Path("notebooks/b.md"), Path("stage03_engine/README.md")}
    assert rewrite(text, Path("notebooks/a.md"), chapters.__contains__, ROOT) == (
        "[a](b.md) [c](source:stage03_engine/errors.py#L3)\n```\n[c](../stage03_engine/errors.py)\n```\n[d](https://x.y/z) [e](#f) [g](../stage03_engine/README.md)\n"
    )


@given(st.text(alphabet='[]()# \n`~ab./:"', max_size=60))
def test_a_text_that_was_rewritten_stays_as_it_is(text: str) -> None:
    once = rewrite(text, Path("README.md"), lambda path: False, ROOT)
    assert rewrite(once, Path("README.md"), lambda path: False, ROOT) == once


@pytest.mark.parametrize("module", list(walk_modules()), ids=Path.as_posix)
def test_the_reference_has_every_public_name(module: Path) -> None:
    page = module_page(ROOT / module, module.as_posix())
    headings = {line.lstrip("# ") for line in page.splitlines() if line.startswith("#")}
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.col_offset == 0:
            methods = {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef) and each.name[0] != "_"
            }
            assert {node.name, *methods} <= headings
    assert page.count("```") % 2 == 0


def notebooks() -> list[Path]:
    """The sources of all notebooks, paths from the root."""
    return [path.relative_to(ROOT) for path in sorted(ROOT.glob("notebooks/[0-9][0-9]_*.py"))]


def test_each_question_has_one_right_answer_and_says_why_of_all() -> None:
    chapters = {path.with_suffix("").as_posix() for _, found in parts() for path in found}
    counts: dict[str, int] = {}
    for question in questions():
        assert question.chapter in chapters
        counts[question.chapter] = counts.get(question.chapter, 0) + 1
        assert sum(choice.right for choice in question.choices) == 1 and len(question.choices) >= 3, question.ask
        assert len({choice.text for choice in question.choices}) == len(question.choices)
        assert all(choice.text and choice.why.endswith(".") for choice in question.choices), question.ask
    assert set(counts.values()) == {3}
    assert {path.with_suffix("").as_posix() for path in notebooks()} <= set(counts), "a notebook without questions"


def test_each_notebook_has_a_line_for_everyone_and_one_that_its_code_bears_out(tree: Path) -> None:
    """The name that the deeper line speaks of is there, and what is to be moved is in the book."""
    assert set(asides()) == {path.with_suffix("").as_posix() for path in notebooks()}
    runs = {path.name for path in build.recordings()}
    for chapter, aside in asides().items():
        assert all(text.endswith(".") and "\n" not in text for text in (aside.everyone, aside.deeper)), chapter
        file, _, name = aside.code.partition(" ")
        names = {""}
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            names |= {str(getattr(target, "name", getattr(target, "id", ""))) for target in targets}
        assert name in names, (chapter, aside.code)
        kind, _, place = aside.to.partition(":")
        if kind == "page":
            assert place == "napkin.html" or place.removeprefix("players/").removesuffix(".html") in runs, aside.to
        else:
            assert kind == "source" and (ROOT / place).exists(), aside.to
        cells = json.loads((tree / f"{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert "".join(cells[1]["source"]) == aside_of(Path(f"{chapter}.ipynb")), "below the title"


def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "NEEDED", ("no_such_package",))
    assert main(["book", "--out", str(tmp_path)]) == 2
    assert "the book needs no_such_package: run `make book`" in capsys.readouterr().err
    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert main(["book", "--out", str(tmp_path)]) == 2
    assert "the book is made from the project's folder" in capsys.readouterr().err


def test_only_an_earlier_book_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "NEEDED", ())
    (tmp_path / "mine.txt").write_text("years of work")
    for place in (tmp_path, tmp_path / "mine.txt"):
        assert main(["book", "--out", str(place)]) == 2
        assert "exists and is no book" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "years of work"


# The book itself


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get("BOOK_DIR"):
        return Path(folder)
    if missing := [name for name in build.NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)} (`make book` installs them)")
    folder = tmp_path_factory.mktemp("site") / "book"
    assert main(["book", "--out", str(folder)]) == 0
    return folder


class _Page(HTMLParser):
    """What a page has and what it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and "href" in given and given.get("rel") != "canonical":
            self.loaded.append(given["href"])


MAKES_ITS_OWN_PLACES = ("walk.html", "lab/index.html", "lab/exercises.html")  # `#fn=Scheduler.schedule`


@pytest.mark.long
def test_every_link_leads_somewhere_and_nothing_comes_from_elsewhere(book: Path) -> None:
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in book.rglob("*.html")}
    assert len(pages) > 300
    wrong = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.loaded and url.scheme != "data":
                    wrong.append((path, link))
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                url.fragment
                and target in pages
                and not target.as_posix().endswith(MAKES_ITS_OWN_PLACES)
                and unquote(url.fragment) not in pages[target].anchors
            ):
                wrong.append((path, link))
    assert not wrong, [f"{path.relative_to(book)}: {link[:200]}" for path, link in wrong[:20]]


@pytest.mark.long
def test_it_is_small_and_has_no_trace_of_this_machine(book: Path) -> None:
    files = [path for path in book.rglob("*") if path.is_file()]
    sizes = {path: path.stat().st_size for path in files}
    of_lab = sum(size for path, size in sizes.items() if path.is_relative_to(book / "lab"))
    assert sum(sizes.values()) - of_lab < MEGABYTES * 1e6 and of_lab < MEGABYTES_OF_LAB * 1e6
    for path in files:
        if path.suffix in (".html", ".js", ".css"):
            assert str(ROOT) not in path.read_text(encoding="utf-8"), path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(book: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(book)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_without_an_error(book: Path, address: str, browser: Any, scheme: str) -> None:
    """In Chromium: nothing in the console, nothing from another host, nothing wider than the window."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    said: list[str] = []
    page.on(
        "console",
        lambda message: said.append(f"{page.url}: {message.text}") if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
    page.on(
        "request",
        lambda request: (
            said.append(f"{page.url} asks {request.url}")
            if not request.url.startswith((address, "data:", "blob:", "about:"))
            else None
        ),
    )
    for path in sorted(book.rglob("*.html")):
        name = path.relative_to(book).as_posix()
        if name.startswith("source/") and scheme == "dark":
            continue
        page.goto(address + name)
        if not name.startswith("source/") and page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"):
            said.append(f"{name} is wider than the window")
    context.close()
    assert not said, said[:20]


@pytest.mark.long
def test_a_word_is_found(address: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{address}search.html?q=preemption")
    page.wait_for_selector("#search-results li a")
    page.close()


# Who cannot see it, or not well: axe-core, of the package axe-playwright-python, which is skipped where it is not installed

AXE = """() => axe.run().then(({ violations }) => violations.filter(({ impact }) => ["serious", "critical"].includes(impact))
  .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html }) => html.slice(0, 100)).join("  ")}`))"""


def axe_source() -> str:
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def barriers(browser: Any, addresses: list[str], scheme: str) -> list[str]:
    """What axe finds serious or critical on these pages."""
    source, found = axe_source(), []
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(1000 * 60)
    for address in addresses:
        page.goto(address)
        page.wait_for_function("typeof player === 'undefined' || player !== null")
        page.evaluate(source)
        found += [f"{address}: {line}" for line in page.evaluate(AXE)]
    page.close()
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_bars_the_way_on_a_page_that_needs_no_sphinx(browser: Any, tmp_path: Path, scheme: str) -> None:
    from stage01_cli.tools.napkin.page import build_page
    from stagetrace.player import page

    pages = {"napkin": build_page(), "player": page(ROOT / "trace" / "recorded" / "chances", start="step=6")}
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
    addresses = [(ROOT / build.WALK).as_uri(), *((tmp_path / f"{name}.html").as_uri() for name in pages)]
    assert barriers(browser, addresses, scheme) == []


def test_a_barrier_is_found(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<html lang=en><title>x</title><main><h1>x</h1><p style='color: #ccc'>pale</p><button></button>"
    )
    [button, pale] = barriers(browser, [(tmp_path / "bad.html").as_uri()], "light")
    assert "button-name" in button and "color-contrast" in pale


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_bars_the_way_on_any_page(book: Path, address: str, browser: Any, scheme: str) -> None:
    names = [path.relative_to(book).as_posix() for path in sorted(book.rglob("*.html"))]
    listings = [name for name in names if name.startswith("source/") and not name.endswith("walk.html")]
    own = [name for name in names if name not in listings]
    found = barriers(browser, [address + name for name in [*own, *listings[:3]]], scheme)  # listings are all alike
    assert not found, found[:20]
