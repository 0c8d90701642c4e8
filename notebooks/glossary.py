"""The words of the course: GLOSSARY.md, and links to it (with what a word says as the hover) where a notebook first uses one.

`glossary.toml` is the source. `build.py` uses this file; the sources of the notebooks know nothing of it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "GLOSSARY.md"
HEAD = """\
# Glossary

The words of the course, in one or two sentences each, and where to find them. In the notebooks the first use of each is a link to here: rest the pointer on it.
(Made from `glossary.toml` by `make notebooks-build`; change that file.)
"""
# What is no plain text: code, links and pictures, HTML, and the mark of a prediction.
_NOT_TEXT = re.compile(r"(`[^`]*`|!?\[[^\[\]]*\]\([^()]*\)|<[^<>]*>|\*\*Predict\.\*\*)")


@dataclass(frozen=True)
class Term:
    """A word. `also` are other forms of it; `code` is a path from the project's root."""

    name: str
    says: str
    code: str
    vllm: str
    also: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """Of its heading, as code hosts make it."""
        return self.name.lower().replace(" ", "-")

    @property
    def link(self) -> str:
        """What stands behind `[word]`: the address, and what the hover shows."""
        return f'({PAGE.name}#{self.anchor} "{self.says}")'


def read() -> list[Term]:
    """All terms, in the order of the alphabet."""
    table = tomllib.loads((FOLDER / "glossary.toml").read_text(encoding="utf-8"))
    terms = [
        Term(name, entry["says"], entry["code"], entry["vllm"], tuple(entry.get("also", ())))
        for name, entry in table.items()
    ]
    return sorted(terms, key=lambda term: term.name.lower())


def page() -> str:
    """GLOSSARY.md."""
    parts = [f"## {term.name}\n\n{term.says}\n\n{_where(term)}\n" for term in read()]
    return "\n".join([HEAD, *parts])


def _where(term: Term) -> str:
    name = "vLLM has no name for it" if term.vllm == "none" else f"in vLLM: `{term.vllm}`"
    return f"Here: [{term.code}](../{term.code}); {name}."


class Linker:
    """Links the first use of each term in one notebook, cell after cell."""

    def __init__(self) -> None:
        words = {word.lower(): term for term in read() for word in (term.name, *term.also)}
        longest_first = sorted(words, key=len, reverse=True)  # "block table" before "block"
        self._words = words
        self._pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest_first))})(?![\w-])", re.IGNORECASE)
        self._linked: set[str] = set()

    def cell(self, text: str) -> str:
        """A markdown cell with links. Headings, tables and code blocks stay as they are."""
        lines, in_code = text.split("\n"), False
        for number, line in enumerate(lines):
            if line.startswith("```"):
                in_code = not in_code
            elif not in_code and not line.startswith(("#", "|")):
                lines[number] = self._line(line)
        return "\n".join(lines)

    def _line(self, line: str) -> str:
        pieces = _NOT_TEXT.split(line)  # text, not text, text, ...
        return "".join(
            piece if place % 2 else self._pattern.sub(self._linked_once, piece) for place, piece in enumerate(pieces)
        )

    def _linked_once(self, match: re.Match[str]) -> str:
        word = match[0]
        term = self._words[word.lower()]
        if term.name in self._linked or (term.name.isupper() and not word.isupper()):
            return word
        self._linked.add(term.name)
        return f"[{word}]{term.link}"
