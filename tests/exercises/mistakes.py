"""The table of mistakes in TEACHING.md, made from the mutants: `python tests/exercises/mistakes.py` writes it anew."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

for _folder in (Path(__file__).parent, Path(__file__).parents[2]):
    sys.path.insert(0, str(_folder))

from judging import text_of  # noqa: E402

from stage01_cli.tools.course.exercises import FOLDER, exercises  # noqa: E402

TEACHING = FOLDER / "TEACHING.md"
BEGIN, END = "<!-- the mistakes: written by tests/exercises/mistakes.py -->", "<!-- the mistakes end -->"


def table() -> str:
    """A row for each mutant: its misconception, and words from the verdict that it gets."""
    rows = ["| exercise | mistake | the judge says |", "| --- | --- | --- |"]
    for exercise in exercises().values():
        for path in sorted((exercise.folder / "mutants").glob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            mistake = " ".join(docstring.partition("Misconception: ")[2].split())
            said = " ".join(text_of(path, "REJECTED").split())
            rows.append(f"| {exercise.number} | {_cell(mistake)} | {_cell(said)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    for mark in "\\|*_<`":
        text = text.replace(mark, f"\\{mark}")
    return text


def written() -> tuple[str, str, str]:
    """What stands before the table, the table, what stands after it."""
    before, _, rest = TEACHING.read_text(encoding="utf-8").partition(BEGIN + "\n")
    middle, _, after = rest.partition("\n" + END)
    return before, middle, after


if __name__ == "__main__":
    before, _, after = written()
    TEACHING.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
