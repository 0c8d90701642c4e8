"""The exercises that a browser can judge, as a page beside the laboratory: its data, its archive of the project, the wheels."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

from stage01_cli.tools.book.chapters import ROOT
from stage01_cli.tools.course.exercises import Exercise, exercises
from stage01_cli.tools.lab.page import read_static as of_lab
from stage01_cli.tools.lab.static_site import plain
from stagetrace.player.frame import framed

STATIC = Path(__file__).resolve().parent / "static"
MODULE = "stage01_cli.tools.book.in_browser"
WHEELS = (
    "msgspec", "hypothesis", "pytest", "pluggy", "iniconfig", "packaging", "sortedcontainers", "pygments",
    "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "starlette", "anyio", "idna",
)  # fmt: skip
"""What the judges import; `pip download` fetches them for Pyodide, see the README."""
PINNED = {"pydantic": "2.14.3", "pydantic_core": "2.50.4"}  # a pair: each takes no other
NOT_HERE = {3: "its judge needs sockets and threads, which no page has"}
"""Exercises without tensors that stay outside, and why."""
SOURCES = (
    "stage0?_*/**/*.py", "stage0?_*/**/*.json", "stage0?_*/**/*.toml", "trace/stagetrace/**/*.py", "tests/exercises/*.py",
    "notebooks/exercises/ex*/*.py", "notebooks/exercises/ex*/*.toml", "notebooks/exercises/ex*/*.json",
)  # fmt: skip
RECORDED = ("one_request", "mixed", "prefix_hits", "client_abort", "bug_*")  # exercise 13 diagnoses these
LEFT_OUT = ("bundled", "__pycache__", "native")


def missing_wheels(pyodide: Path) -> list[str]:
    """What a folder has no wheel of."""
    return [name for name in WHEELS if wheel_of(pyodide, name) is None]


def wheel_of(pyodide: Path, name: str) -> Path | None:
    """The wheel of a package for Pyodide: a pure one, or one that was compiled for it."""
    return next(
        (path for kind in ("none-any", "wasm32") for path in sorted(pyodide.rglob(f"{name}-*{kind}.whl"))), None
    )


def requirements() -> list[str]:
    """The wheels, as pip wants them."""
    return [f"{name}=={PINNED[name]}" if name in PINNED else name for name in WHEELS]


def here(exercise: Exercise) -> bool:
    """Can a browser judge it?"""
    return not exercise.tensors and exercise.number not in NOT_HERE


def write_page(lab: Path, pyodide: Path) -> int:
    """Write the page into the folder of the laboratory, whose Pyodide and worker it uses. Returns how many exercises it judges."""
    wheels = []
    for name in WHEELS:
        found = wheel_of(pyodide, name)
        assert found is not None, name
        if not (lab / found.name).exists():
            shutil.copyfile(found, lab / found.name)
        wheels.append(found.name)
    write_sources(lab / "judges.zip")
    size = sum(path.stat().st_size for path in (*lab.glob("*.whl"), *lab.glob("pyodide/*"), lab / "judges.zip"))
    start = {"wheels": wheels, "sources": "judges.zip", "module": MODULE, "megabytes": round(size / 1e6)}
    page = build_page(start)
    (lab / "exercises.html").write_text(page, encoding="utf-8")
    return sum(here(each) for each in exercises().values())


def write_sources(path: Path) -> None:
    """Zip what the judges read of the project."""
    files = {file for pattern in SOURCES for file in ROOT.glob(pattern)}
    files |= {file for name in RECORDED for file in (ROOT / "trace" / "recorded").glob(f"{name}/*")}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files):
            inside = file.relative_to(ROOT)
            if file.is_file() and not set(inside.parts) & set(LEFT_OUT):
                archive.writestr(plain(inside.as_posix()), file.read_bytes())


def build_page(start: dict[str, Any]) -> str:
    """The page. It runs its own script and asks its own server, and nothing else."""
    found = [_row(each) for each in exercises().values()]
    script = of_lab("python.js") + "\n" + (STATIC / "exercises.js").read_text(encoding="utf-8")
    pool = (STATIC / "pool_in_lab.txt").read_text(encoding="utf-8")
    data = {"start": start, "exercises": found, "pool_in_lab": pool}
    body, style = ((STATIC / f"exercises.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    return framed("The exercises, in the browser", body, style, script, data, STATIC, "python")[0]


def _row(exercise: Exercise) -> dict[str, Any]:
    """What the page shows of an exercise; of one that it cannot judge, why."""
    row: dict[str, Any] = {
        "number": exercise.number,
        "name": exercise.name,
        "title": exercise.title,
        "goal": exercise.goal,
    }
    row["text"] = f"../notebooks/exercises/{exercise.name}/README.html"
    if not here(exercise):
        return row | {"why_not": NOT_HERE.get(exercise.number, "it computes with torch")}
    return row | {
        "starter": exercise.starter.read_text(encoding="utf-8"), "hints": exercise.hints, "contract": exercise.contract,
    }  # fmt: skip
