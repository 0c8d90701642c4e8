"""Three questions at the end of a chapter: whoever opens a choice reads whether it is right, and why. No script is needed."""

from __future__ import annotations

import html
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent / "quiz.toml"


@dataclass(frozen=True)
class Choice:
    """An answer to choose. `why` explains it, right or wrong."""

    text: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Question:
    """`chapter` is the path of a chapter, without its suffix."""

    chapter: str
    ask: str
    choices: tuple[Choice, ...]


@cache
def questions() -> tuple[Question, ...]:
    """All questions, in order."""
    table: list[dict[str, Any]] = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["question"]
    return tuple(
        Question(one["chapter"], one["ask"], tuple(Choice(**each) for each in one["choices"])) for one in table
    )


def quiz_of(chapter: Path) -> str:
    """Markdown to put at the end of a chapter; empty if there is no question about it."""
    found = [one for one in questions() if one.chapter == chapter.with_suffix("").as_posix()]
    if not found:
        return ""
    lines = ["## Did it stick?", "", "Choose before you read on: each answer opens, and says why."]
    for number, question in enumerate(found, 1):
        lines += ["", f"**{number}.** {question.ask}", ""]
        lines += [_choice(each) for each in question.choices]
    return "\n".join(lines) + "\n"


def _choice(choice: Choice) -> str:
    kind, verdict = ("right", "Right.") if choice.right else ("wrong", "No.")
    says = f"<p><b>{verdict}</b> {html.escape(choice.why, quote=False)}</p>"
    return (
        f'<details class="choice {kind}"><summary>{html.escape(choice.text, quote=False)}</summary>{says}</details>\n'
    )
