"""What the reader has done so far: a small table in `work/progress.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stage03_engine.errors import ConfigError


@dataclass
class Done:
    """Of one exercise. Times are UTC, ISO 8601; empty means not yet."""

    started: str = ""
    checks: int = 0
    passed: str = ""
    served: str = ""
    hints: int = 0


def path(work: Path) -> Path:
    """Where the table lies."""
    return work / "progress.json"


def read(work: Path) -> dict[str, Done]:
    """Name of the exercise -> what was done. Raises ConfigError for a file that is not such a table."""
    known = {field.name: type(field.default) for field in fields(Done)}
    try:
        return {name: Done(**_checked(row, known)) for name, row in _rows(work).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path(work)} is not a table of progress ({error}); remove it to begin a new one") from error


def _rows(work: Path) -> dict[str, dict[str, Any]]:
    text = path(work).read_text(encoding="utf-8") if path(work).exists() else "{}"
    rows: dict[str, dict[str, Any]] = json.loads(text)
    return rows


def _checked(row: dict[str, Any], known: dict[str, type]) -> dict[str, Any]:
    """The fields that this version knows. Raises TypeError for a value of another type."""
    for name, kind in known.items():
        if type(row.get(name, kind())) is not kind:
            raise TypeError(f"{name} is {row[name]!r}")
    return {name: value for name, value in row.items() if name in known}


def update(work: Path, name: str, change: Callable[[Done], None]) -> Done:
    """Change the row of an exercise and write the table; returns the row. A crash leaves the old table or the new one; what a
    newer version wrote stays."""
    done = read(work).get(name, Done())
    change(done)
    work.mkdir(parents=True, exist_ok=True)
    rows = _rows(work)
    rows[name] = rows.get(name, {}) | asdict(done)
    new = path(work).with_suffix(f".{os.getpid()}.new")  # another check may write at the same time
    new.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")
    os.replace(new, path(work))
    return done


def now() -> str:
    """The time as the table has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
