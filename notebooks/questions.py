"""The page of questions, made from exercises/questions.toml: by week, each answer folded, with what proves it."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "exercises"
SOURCE, PAGE = FOLDER / "questions.toml", FOLDER / "QUESTIONS.md"
ROOT = FOLDER.parent.parent
WEEKS = (
    "One request, end to end", "The start", "HTTP and text", "Two processes", "Memory", "Turns", "The step itself", "The next token",
    "Faster, and more than one", "Running it",
)  # fmt: skip
KINDS = {"recall": "Recall", "apply": "Compute", "debug": "Debug"}
_TOP = """\
# Sixty questions

The kind that an interviewer for an inference job would ask. Six for each of the ten weeks of [the plan](TEACHING.md#ten-weeks): two to recall, two to
compute with a pencil, two to debug. Answer aloud, then unfold. Each answer names what proves it: a notebook or a file, and the events
to look for in a recording (`stages trace view`).

<!-- made from questions.toml by `python notebooks/build.py`: change it there -->
"""


@dataclass(frozen=True)
class Question:
    """One question. `proof`: paths from the project's root, with `::Name` for what stands in a file; `compute`: (expression, the number in the answer)."""

    week: int
    kind: str
    ask: str
    answer: str
    proof: list[str]
    events: list[str] = field(default_factory=list)
    compute: list[list[str]] = field(default_factory=list)


def read() -> list[Question]:
    """All questions, in order."""
    return [Question(**one) for one in tomllib.loads(SOURCE.read_text(encoding="utf-8"))["question"]]


def page() -> str:
    """The text of QUESTIONS.md."""
    parts, number = [_TOP], 0
    for week, title in enumerate(WEEKS, 1):
        parts.append(
            f"## Week {week}: {title[0].lower()}{title[1:]}\n" if title[:4] != "HTTP" else f"## Week {week}: {title}\n"
        )
        for question in (one for one in read() if one.week == week):
            number += 1
            parts.append(f"**{number}. {KINDS[question.kind]}.** {question.ask}\n")
            parts.append(
                f"<details><summary>Answer</summary>\n\n{question.answer}\n\n{_proof(question)}\n\n</details>\n"
            )
    return "\n".join(parts)


def _proof(question: Question) -> str:
    events = [f"`{event}`" for event in question.events]
    return "*See* " + ", ".join([*map(link, question.proof), *events]) + "."


def link(proof: str) -> str:
    """`notebooks/lab.py::source` as a link from the page."""
    path, _, name = proof.partition("::")
    label = f"`{name}`" if name else Path(path).parent.name if path.endswith("README.md") else Path(path).name
    return f"[{label}]({os.path.relpath(ROOT / path, FOLDER)})"
