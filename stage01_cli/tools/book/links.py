"""Links between chapters, and from a chapter to the code.

Chapters keep their places in the book, so that links among them stay as they are. What they name that is no chapter becomes a page or
a copy: `source:PATH#L52` stands for it until the page that has the link is known (conf.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

LINK = re.compile(r"(?<=\]\()([^()\s<>]+)(?=\)|\s+\")")
FENCE = re.compile(r"^\s*(```|~~~)")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:")
PICTURES = (".png", ".svg", ".gif", ".webp")
COPIED = (".html",)
"""What a browser shows as it is; all else becomes a page with numbered lines."""


def rewrite(text: str, chapter: Path, is_chapter: Callable[[Path], bool], root: Path) -> str:
    """The text of a chapter, with `source:` before each link that leads to a file or folder of the project that is no chapter. Code stays as it is."""

    def changed(found: re.Match[str]) -> str:
        link = found.group(1)
        target, _, place = link.partition("#")
        if not target or SCHEME.match(link):
            return link
        path = Path(os.path.normpath(chapter.parent / target))
        if (root / path).is_dir() and is_chapter(path / "README.md"):
            return f"{link.rstrip('/')}/README.md"
        if is_chapter(path) or target.endswith(PICTURES) or not (root / path).exists():
            return link
        return f"source:{path.as_posix()}" + (f"#{place}" if place else "")

    return "".join(line if code else LINK.sub(changed, line) for line, code in _lines(text))


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """(line, is it code) of a Markdown text."""
    fence = ""
    for line in text.splitlines(keepends=True):
        found = FENCE.match(line)
        if found and not fence:
            fence = found.group(1)
            yield line, True
        elif found and found.group(1) == fence:
            fence = ""
            yield line, True
        else:
            yield line, bool(fence)


def targets(text: str) -> Iterator[str]:
    """The files and folders that `rewrite` has found."""
    for found in LINK.finditer(text):
        if found.group(1).startswith("source:"):
            yield found.group(1).removeprefix("source:").partition("#")[0]


def pictures(text: str, chapter: Path) -> Iterator[Path]:
    """What the text of a chapter shows, as paths from the root."""
    for found in LINK.finditer(text):
        if found.group(1).endswith(PICTURES):
            yield Path(os.path.normpath(chapter.parent / found.group(1)))


def page_of(target: str, is_folder: bool) -> str:
    """Where in the book a file or a folder is shown."""
    if is_folder:
        return f"source/{target.rstrip('/')}/index.html"
    return f"source/{target}" if target.endswith(COPIED) else f"source/{target}.html"


def relative(to: str, page: str) -> str:
    """The link from one page of the book to another."""
    return os.path.relpath(to, PurePosixPath(page).parent)
