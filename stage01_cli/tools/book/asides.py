"""What stands at the head of a chapter: a line for everyone, a folded one for those who go deeper, one thing to move. No script is needed."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "asides.toml"


@dataclass(frozen=True)
class Aside:
    """`chapter` is the path of a chapter without its suffix; `code` is the file, and often the name in it, of which `deeper` speaks."""

    chapter: str
    everyone: str
    deeper: str
    code: str
    move: str
    to: str


@cache
def asides() -> dict[str, Aside]:
    """Chapter -> what stands at its head."""
    table = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["aside"]
    return {one["chapter"]: Aside(**one) for one in table}


def aside_of(chapter: Path) -> str:
    """Markdown to put below the first words of a chapter; empty if there is none for it."""
    one = asides().get(chapter.with_suffix("").as_posix())
    if one is None:
        return ""
    file, _, name = one.code.partition(" ")
    return (
        f"**For everyone.** {one.everyone}\n\n"
        f"<details><summary>One step deeper</summary>\n\n{one.deeper} In the code: [`{name or file}`](source:{file}).\n\n</details>\n\n"
        f"**By hand.** [{one.move}]({one.to}).\n"
    )
