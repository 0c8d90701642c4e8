"""What the reader has done so far: a small table in `work/progress.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

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
    if not path(work).exists():
        return {}
    try:
        table = json.loads(path(work).read_text(encoding="utf-8"))
        return {name: Done(**done) for name, done in table.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path(work)} is not a table of progress ({error}); remove it to begin a new one") from error


def update(work: Path, name: str, change: Callable[[Done], None]) -> Done:
    """Change the row of an exercise and write the table; returns the row. A crash leaves the old table or the new one."""
    table = read(work)
    done = table.setdefault(name, Done())
    change(done)
    work.mkdir(parents=True, exist_ok=True)
    new = path(work).with_suffix(".new")
    rows = {name: asdict(each) for name, each in sorted(table.items())}
    new.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path(work))
    return done


def now() -> str:
    """The time as the table has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
