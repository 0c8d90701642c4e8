"""The grades of one student as Gradescope reads them: `results.json`, a test for each exercise. Source: "Autograder Specifications" of
Gradescope's documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stage01_cli.tools.course.exercises import find
from stage01_cli.tools.course.grading import Grade
from stage03_engine.errors import ConfigError


def write_results(grades: Iterable[Grade], path: Path) -> None:
    """Write the file when all are judged. Raises ConfigError for the grades of several students: Gradescope asks for one at a time."""
    rows = list(grades)
    students = {row.student for row in rows}
    if len(students) > 1:
        raise ConfigError(f"--results is for one student, and there are {len(students)}; --csv has them all")
    found = {"tests": [_test(row) for row in rows], "stdout_visibility": "hidden"}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _test(row: Grade) -> dict[str, Any]:
    if not row.exercise:
        return {"name": "submission", "score": 0, "max_score": 0, "status": "failed", "output": row.verdict}
    exercise = find(row.exercise)
    said = [f"late by {row.late}" if row.late else "", row.verdict, f"speed: {row.speed}" if row.speed else ""]
    return {
        "name": f"{exercise.number}. {exercise.title}",
        "score": row.points,
        "max_score": exercise.points,
        "status": "passed" if row.outcome == "passed" else "failed",
        "output": "\n".join(filter(None, said)),
        "output_format": "text",
    }
