"""The book: everything there is to read is in it once, its links lead somewhere, and it is made of nothing but the project.

`-m long` builds it, follows every link, and opens every page in Chromium, light and dark, wide and narrow, under axe. It needs what `make book` installs; PYODIDE_DIR holds what
`--pyodide` wants, for the pages in lab/; BOOK_DIR names a book that is made already.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from barriers import axe_source, on_page, without_scripts
from hypothesis import given, strategies as st
from patience import PATIENCE, wait_until

from stage01_cli.main import main
from stage01_cli.tools.book import build, exercise_page, own_text_page
from stage01_cli.tools.book.asides import aside_of, asides
from stage01_cli.tools.book.build import write_tree
from stage01_cli.tools.book.chapters import ROOT, parts, walk_modules
from stage01_cli.tools.book.links import LINK, rewrite
from stage01_cli.tools.book.listing import css, file_page, folder_page
from stage01_cli.tools.book.quiz import questions
from stage01_cli.tools.book.reference import module_page

pytest_plugins = ["browser"]
NOT_IN_IT = {"AGENTS.md"}  # for those who work on the project
MEGABYTES = 40
MEGABYTES_OF_LAB = 36  # Pyodide, its wheels, gpt2-tiny and the laboratory, only with --pyodide


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
    given = os.environ.get("PYODIDE_DIR")
    assert main(["book", "--out", str(folder), *(["--pyodide", given] if given else [])]) == 0
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


BY_THEMSELVES = ("genindex.html", "search.html")  # the theme's: an index of nothing, and what a search opens
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
def test_every_page_can_be_reached_from_the_first(book: Path) -> None:
    """By links, and not by search alone; one's own text in the browser among them."""
    linked = {book / "index.html"}
    new = set(linked)
    while new:
        links = (
            (path, unquote(urlsplit(link).path))
            for path in new
            for link in _Page(path.read_text(encoding="utf-8")).links
        )
        targets = {(path.parent / link).resolve() for path, link in links if link}
        new = {path for path in targets if path.suffix == ".html" and path.exists()} - linked
        linked |= new
    pages = set(book.rglob("*.html")) - {book / name for name in BY_THEMSELVES}
    assert not pages - linked, sorted(path.relative_to(book).as_posix() for path in pages - linked)[:20]


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
def test_a_word_is_found(address: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{address}search.html?q=preemption")
    page.wait_for_selector("#search-results li a")
    page.close()


# The kinds of pages, and who cannot see them, or not well


def _lab() -> str:
    from stage01_cli.tools.lab.page import build_page

    return build_page({"mode": "server", "own": None, "editor": False})[0]


def _napkin() -> str:
    from stage01_cli.tools.napkin.page import build_page

    return build_page()


def _player() -> str:
    from stagetrace.player import page

    return page(ROOT / "trace" / "recorded" / "chances", start="step=6")


START = {"wheels": [], "sources": "", "module": "", "modules": {}, "megabytes": 0}
KINDS: dict[str, tuple[str, Callable[[], str] | None]] = {
    "chapter": ("", None),  # Sphinx makes it: -m long
    "file": ("stage01_cli/tools/book/listing.py", lambda: file_page(ROOT / "stage03_engine/core/scheduler.py", "a.py", "")),
    "folder": ("stage01_cli/tools/book/listing.py", lambda: folder_page(ROOT / "stage03_engine", "a", "", {"core": "b"})),
    "The napkin": ("stage01_cli/tools/napkin/page.py", _napkin),
    "The scheduler's laboratory": ("stage01_cli/tools/lab/page.py", _lab),
    "The exercises, in the browser": ("stage01_cli/tools/book/exercise_page.py", lambda: exercise_page.build_page(START)),
    "Your own text, in the browser": ("stage01_cli/tools/book/own_text_page.py", lambda: own_text_page.build_page(dict(START))),
    "player": ("trace/stagetrace/player/build.py", _player),
    "walk": ("stage01_cli/tools/walk/page.py", (ROOT / build.WALK).read_text),
}  # fmt: skip
"""Kind -> the module that puts such a page together, and one of them, without Sphinx."""
PUT_TOGETHER = ("framed", "assemble", "PAGE.format")


def kind_of(text: str) -> str:
    """The kind of a page, by what it is made of."""
    if "data-content_root" in text[:500]:
        return "chapter"
    if "_static/listing.css" in text[:500]:
        return "file" if '<div class="highlight">' in text else "folder"
    title = html.unescape(text.partition("<title>")[2].partition("</title>")[0])
    for kind, mark in (("player", 'id="recordings"'), ("walk", " · walk")):
        if mark in text:
            return kind
    return title


def test_whatever_puts_a_page_together_is_a_kind() -> None:
    """A module with a new kind of page has to be in KINDS, and so under axe."""
    found = set()
    for house in ("stage01_cli", "trace"):
        for path in (ROOT / house).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in PUT_TOGETHER:
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == {module for module, _ in KINDS.values() if module}


@pytest.mark.slow(keep=("folder", "napkin"))
@pytest.mark.parametrize("kind", [kind for kind, (_, made) in KINDS.items() if made])
def test_nothing_bars_the_way_on_a_page_of_each_kind(browser: Any, tmp_path: Path, kind: str) -> None:
    made = KINDS[kind][1]
    assert made is not None
    (tmp_path / "_static").mkdir()
    if kind in ("file", "folder"):
        pytest.importorskip("a11y_pygments", reason="the theme of the book brings the colours of code")
        (tmp_path / "_static/listing.css").write_text(css(), encoding="utf-8")
    (tmp_path / "page.html").write_text(made(), encoding="utf-8")
    assert kind_of(made()) == kind
    assert barriers(browser, [(tmp_path / "page.html").as_uri()]) == []


@pytest.mark.slow(keep=("folder", "napkin"))
@pytest.mark.parametrize("kind", [kind for kind, (_, made) in KINDS.items() if made])
def test_without_scripts_a_page_shows_what_it_looks_like_with_them(browser: Any, tmp_path: Path, kind: str) -> None:
    """A page that needs none has its text."""
    made = KINDS[kind][1]
    assert made is not None
    text = made()
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    ((_, pictures, words),) = without_scripts(browser, [(tmp_path / "page.html").as_uri()])
    if "<script" in text:
        assert len(pictures) == 1 and len(pictures[0].split()) > 10, "a picture, and what is on it"
        assert "JavaScript, which is switched off here" in words or "JavaScript is switched off here" in words
    else:
        assert kind in ("file", "folder") and len(words) > 50


@pytest.mark.long
def test_without_scripts_the_whole_book_can_be_read(book: Path, address: str, browser: Any) -> None:
    """Its chapters need none; every other page shows what it looks like with them."""
    texts = {address + path.relative_to(book).as_posix(): path.read_text("utf-8") for path in book.rglob("*.html")}
    seen = {kind_of(text) for text in texts.values()}
    assert seen - set(KINDS) == set()
    for page, pictures, words in without_scripts(browser, sorted(texts)):
        assert len(words) > 30, page
        if "<noscript" in texts[page]:
            assert pictures and all(pictures), page


UNPACKED = "typeof player === 'undefined' || player !== null"
"""A page that forbids to evaluate texts can be asked again and again by `evaluate`, not by `wait_for_function`."""


def barriers(browser: Any, addresses: list[str], host: str | None = None) -> list[str]:
    """What axe finds on these pages; with a `host` also what the console says, and who else is asked."""
    source, found = axe_source(), []
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(PATIENCE * 1000)
    if host is not None:
        page.on(
            "console",
            lambda each: found.append(f"{page.url}: {each.text}") if each.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: found.append(f"{page.url}: {error}"))
        own = (host, "data:", "blob:", "about:")
        page.on(
            "request", lambda each: None if each.url.startswith(own) else found.append(f"{page.url} asks {each.url}")
        )
    for address in addresses:
        page.goto(address)
        wait_until(lambda: page.evaluate(UNPACKED), f"{address}: no player")
        if urlsplit(address).path.startswith("/lab/"):  # until Python is there; other folders have that name, too
            page.locator("#status:empty").wait_for(state="attached")
        found += on_page(page, source)
    page.close()
    return found


def test_a_barrier_is_found(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<html lang=en><title>x</title><main><h1>x</h1><p style='color: #ccc'>pale</p><button></button><div style='width: 900px'>wide</div>"
        "<style>@media (prefers-color-scheme: dark) { p { color: #000 !important } }</style>"
    )
    found = barriers(browser, [(tmp_path / "bad.html").as_uri()])
    rules = [(line.split(", ")[1], line.split(", ")[2].split(":")[0], line.split(": ")[1]) for line in found]
    assert rules == [
        ("light", "1280", "button-name"), ("light", "1280", "color-contrast"),
        ("light", "390", "button-name"), ("light", "390", "color-contrast"), ("light", "390", "wider than the window"),
        ("dark", "1280", "button-name"),
        ("dark", "390", "button-name"), ("dark", "390", "wider than the window"),
    ]  # fmt: skip


SHARES = 24  # of the pages: a twelfth took 14 minutes on two very busy cores, and a test may take 15


@pytest.mark.long
@pytest.mark.parametrize("share", range(SHARES))
def test_every_page_opens_without_an_error_or_a_barrier(book: Path, address: str, browser: Any, share: int) -> None:
    """In Chromium, light and dark, wide and narrow: nothing in the console, nothing from another host, nothing wider than the window, and axe
    finds nothing serious."""
    pages = {path.relative_to(book).as_posix(): path for path in sorted(book.rglob("*.html"))}
    kinds = {name: kind_of(path.read_text(encoding="utf-8")) for name, path in pages.items()}
    assert not (strange := {name: kind for name, kind in kinds.items() if kind not in KINDS}), strange
    found = barriers(browser, [address + name for name in [*pages][share::SHARES]], host=address)
    assert not found, found[:20]
