"""What is in the book, in reading order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STAGES = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels")
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Start", ("README.md", "notebooks/README.md", "notebooks/00_*.ipynb")),
    ("The nine phases", tuple(f"notebooks/0{phase}_*.ipynb" for phase in range(1, 10))),
    ("Deeper", ("notebooks/[12]?_*.ipynb", "notebooks/ladder/README.md")),
    ("The four stages", (*(f"{stage}/README.md" for stage in STAGES), "trace/README.md")),
    ("Rebuild it", ("notebooks/exercises/README.md", "notebooks/exercises/ex*/README.md", "notebooks/exercises/QUESTIONS.md", "notebooks/exercises/TEACHING.md")),
    ("The rooms", ("stage0?_*/**/*.md",)),
    ("The documents", ("notebooks/MAP.md", "notebooks/map/*.md")),
    ("About", ("notebooks/GLOSSARY.md", "tests/README.md", "tests/benchmarks/README.md", "CHANGELOG.md")),
)  # fmt: skip
"""Caption of a part -> patterns of its chapters. A chapter belongs to the first pattern that it fits."""


def parts() -> Iterator[tuple[str, list[Path]]]:
    """(caption, chapters) of each part, paths from the root."""
    taken: set[Path] = set()
    for caption, patterns in PARTS:
        found = [path.relative_to(ROOT) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        chapters = [path for path in dict.fromkeys(found) if path not in taken]
        taken.update(chapters)
        yield caption, chapters


def walk_modules() -> Iterator[Path]:
    """The files of the walk, and what every stage imports of the trace, in the order of the stages."""
    for folder in (
        *STAGES[:3],
        "stage03_engine/frontend",
        "stage03_engine/core",
        "stage03_engine/core/models",
        STAGES[3],
        "trace/stagetrace",
    ):
        yield from (path.relative_to(ROOT) for path in sorted((ROOT / folder).glob("*.py")) if path.stat().st_size)
