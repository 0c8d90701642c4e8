"""Write the tree that Sphinx reads, let it make the pages, and add what needs no Sphinx: players, listings, the code walk, the pages with sliders."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stage01_cli.tools.book.asides import aside_of
from stage01_cli.tools.book.chapters import PARTS, ROOT, parts, walk_modules
from stage01_cli.tools.book.exercise_page import missing_wheels
from stage01_cli.tools.book.links import COPIED, page_of, pictures, relative, rewrite, targets
from stage01_cli.tools.book.quiz import quiz_of
from stage01_cli.tools.book.reference import module_page
from stage03_engine.errors import ConfigError

STATIC = Path(__file__).resolve().parent / "static"
NEEDED = ("sphinx", "myst_nb", "furo", "matplotlib")
HOW_TO = "run `make book`, or install '.[book]'"
FRONT = """\
# vLLM in stages

What happens between `vllm serve gpt2` and a token: the system itself, small enough to read in a week and real enough to serve. Run it, see it, rebuild it."""
WALK = "notebooks/pictures/walk.html"
MARK = "_static/book.css"
"""By which a book is known: only an earlier one is replaced."""
SET_UP = 'find_spec("stagetrace")'
"""In the first cell of each notebook, and in no other."""


def build_book(out: Path, pyodide: Path | None = None) -> Iterator[str]:
    """Write the book to a folder, and yield a line for each thing done. Raises ConfigError for what is missing."""
    if not (ROOT / PARTS[0][1][0]).exists() or not (ROOT / "notebooks").is_dir():
        raise ConfigError(
            "the book is made from the project's folder, with its READMEs and notebooks; this is an installed package"
        )
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the book needs {', '.join(missing)}: {HOW_TO}")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / MARK).exists())):
        raise ConfigError(f"{out} exists and is no book: --out is a folder that is written anew")
    with tempfile.TemporaryDirectory(prefix="stages-book-") as scratch:
        tree = Path(scratch) / "tree"
        named = write_tree(tree, pyodide is not None, pyodide is not None and not missing_wheels(pyodide))
        yield f"{sum(len(chapters) for _, chapters in parts())} chapters, {len(list(walk_modules()))} pages of reference"
        _write_extras(tree / "_extra", named)
        _write_players(tree)
        if pyodide is not None:
            yield from _write_lab(tree / "_extra" / "lab", pyodide)
        _sphinx(tree, Path(scratch) / "html")
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(
            Path(scratch) / "html", out, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo", "objects.inv")
        )
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    yield f"wrote {out} ({size / 1e6:.1f} MB)"


def write_tree(tree: Path, with_lab: bool = False, with_exercises: bool = False) -> set[str]:
    """Write what Sphinx reads. Returns the files and folders of the project that chapters name and that are no chapters."""
    tree.mkdir(parents=True)
    chapters = {path for _, found in parts() for path in found}
    named: set[str] = set()
    for chapter in sorted(chapters):
        text = (ROOT / chapter).read_text(encoding="utf-8")
        written = _notebook(text, chapter, chapters) if chapter.suffix == ".ipynb" else _text(text, chapter, chapters)
        named.update(targets(written))
        _write(tree / chapter, written)
        for picture in pictures(written, chapter):
            (tree / picture).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / picture, tree / picture)
    reference = []
    for module in walk_modules():
        page = Path("reference") / module.with_suffix(".md")
        text = module_page(ROOT / module, module.as_posix())
        named.update(targets(text))
        _write(tree / page, text)
        reference.append(page)
    _write(
        tree / "reference.md",
        _index(
            "# Reference of the walk\n\nEvery public name of the files that a request passes, from their docstrings.",
            [("", reference)],
            Path(),
        ),
    )
    _write(tree / "players.md", _players())
    front = FRONT + _play(with_lab, with_exercises)
    _write(
        tree / "index.md", _index(front, [*parts(), ("Look it up", [Path("players.md"), Path("reference.md")])], Path())
    )
    (tree / "_static").mkdir()
    for name in ("book.css", "favicon.svg", "search.webp", "search-dark.webp"):
        shutil.copy(STATIC / name, tree / "_static")
    _write(tree / "conf.py", (STATIC / "conf.py").read_text(encoding="utf-8").replace("@ROOT@", str(ROOT)))
    return named


def _text(text: str, chapter: Path, chapters: set[Path]) -> str:
    return rewrite(f"{text}\n{quiz_of(chapter)}", chapter, chapters.__contains__, ROOT)


def _notebook(text: str, chapter: Path, chapters: set[Path]) -> str:
    """A built notebook with its links rewritten, a line for everyone at its head, its questions at the end, and without the cell that looks for the project. Outputs that
    JupyterLab hides are folded."""
    notebook: dict[str, Any] = json.loads(text)
    if aside := aside_of(chapter):
        notebook["cells"].insert(1, {"cell_type": "markdown", "id": "aside", "metadata": {}, "source": aside})
    if quiz := quiz_of(chapter):
        notebook["cells"].append({"cell_type": "markdown", "id": "quiz", "metadata": {}, "source": quiz})
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cell["source"] = rewrite(source, chapter, chapters.__contains__, ROOT)
        elif SET_UP in source:
            cell["metadata"]["tags"] = ["remove-cell"]
        elif cell["metadata"].get("jupyter", {}).get("outputs_hidden"):
            cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-output"]
    return json.dumps(notebook, ensure_ascii=False)


def _index(front: str, found: Iterable[tuple[str, list[Path]]], base: Path) -> str:
    lines = [front, ""]
    for caption, pages in found:
        if pages:
            titled = [f":caption: {caption}"] if caption else []
            lines += [
                "```{toctree}",
                *titled,
                ":maxdepth: 1",
                "",
                *(page.with_suffix("").as_posix() for page in pages),
                "```",
                "",
            ]
    return "\n".join(lines)


def _write_lab(lab: Path, pyodide: Path) -> Iterator[str]:
    """The laboratory, and what uses its Pyodide: one's own text, and the exercises."""
    from stage01_cli.tools.book import own_text_page
    from stage01_cli.tools.book.exercise_page import write_page
    from stage01_cli.tools.lab.static_site import write_site

    yield from list(write_site(lab, pyodide))[:1]
    own_text_page.write_page(lab)
    if missing := missing_wheels(pyodide):
        yield f"no exercises in the browser: {pyodide} has no wheel of {', '.join(missing)}"
    else:
        yield f"{write_page(lab, pyodide)} exercises in the browser"


def _play(with_lab: bool, with_exercises: bool) -> str:
    """What moves, on the first page."""
    lab = (
        [
            "- [Your own text](page:lab/own_text.html): gpt2-tiny writes on in this browser, and you watch its engine, step by step",
            "- [The laboratory](page:lab/index.html): the real scheduler, driven by hand, or a scheduler of your own",
        ]
        if with_lab
        else []
    )
    exercises = (
        ["- [Exercises](page:lab/exercises.html): write a part and have it judged, in this browser"]
        if with_exercises
        else []
    )
    lines = [
        "- [Recordings to play](players.md): real runs, step by step",
        f"- [The code walk](source:{WALK}): the source, with the lines that one request executes",
        "- [The napkin](page:napkin.html): how many users a chip serves, with sliders",
        *lab,
        *exercises,
    ]
    return "\n".join(["", "", *lines])


def recordings() -> list[Path]:
    """The folders of the recordings that come with the project."""
    return sorted(path for path in (ROOT / "trace" / "recorded").iterdir() if path.is_dir())


def _players() -> str:
    lines = [
        "# Recordings to play",
        "",
        "Each is a real run, in a page that plays it step by step: arrow keys, or the buttons. The picture is for those who only look.",
        "",
    ]
    for folder in recordings():
        name = folder.name
        lines += [
            f"## {name}",
            "",
            f"[Play it](page:players/{name}.html)",
            "",
            f"![What the requests of {name} did, step by step](players/{name}.svg)",
            "",
        ]
    return "\n".join(lines)


def _write_players(tree: Path) -> None:
    """A player and a picture of each recording."""
    from stagetrace import Recording, figures, tell
    from stagetrace.player import page

    for folder in recordings():
        _write(tree / "_extra" / "players" / f"{folder.name}.html", page(folder))
        picture = tree / "players" / f"{folder.name}.svg"
        picture.parent.mkdir(exist_ok=True)
        figures.request_timeline(tell(Recording(folder))).savefig(picture)


def _write_extras(extra: Path, named: set[str]) -> None:
    """What is copied beside the pages."""
    from stage01_cli.tools.book.listing import css, file_page, folder_page
    from stage01_cli.tools.napkin.page import build_page as napkin_page

    files = sorted({*named, WALK})
    pages = {name: page_of(name, (ROOT / name).is_dir()) for name in files}
    for name, page in pages.items():
        path, up = ROOT / name, relative(".", page) + "/"
        if path.is_dir():
            inside = {Path(each).name: relative(pages[each], page) for each in files if str(Path(each).parent) == name}
            _write(extra / page, folder_page(path, name, up, inside))
        elif name.endswith(COPIED):
            (extra / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, extra / page)
        else:
            _write(extra / page, file_page(path, name, up))
    _write(extra / "_static" / "listing.css", css())
    _write(extra / "napkin.html", napkin_page())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _sphinx(tree: Path, html: Path) -> None:
    """Raises ConfigError with what Sphinx says, also for a mere warning: a link that leads nowhere is one."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-j",
        "auto",
        "-b",
        "html",
        str(tree),
        str(html),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise ConfigError(f"the book cannot be made:\n{done.stderr.strip()}")
