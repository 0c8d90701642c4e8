"""What is kept of a race: medians, versions and instruction sets, one file for each kind of processor in `results/`."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race.machine import QUIET

Record = dict[str, Any]
"""As `digest` makes it."""
RESULTS = Path(__file__).parent / "results"
KEPT = (
    "date",
    "quick",
    "rounds",
    "tries",
    "threads",
    "machine",
    "settings",
    "workloads",
    "entrants",
    "missing",
    "problems",
)
IMPLIED = {"fma": "avx2", "f16c": "avx2", "avx2": "avx512f", "avx512f": "avx512_vnni"}
"""Instruction set -> one that no processor has without it."""


@dataclass(frozen=True)
class Median:
    """Over the quiet repetitions, or over all where none was quiet."""

    value: float
    quiet: bool

    def __str__(self) -> str:
        digits = 0 if self.value >= 100 else 1 if self.value >= 10 else 2
        return f"{'' if self.quiet else '~'}{self.value:,.{digits}f}"


def digest(result: Record) -> Record:
    """What `--out` writes, without the repetitions. A record stays as it is. Raises ValueError."""
    if "medians" in result:
        return result
    if "repetitions" not in result:
        raise ValueError("not the result of a race")
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in result["repetitions"]:
        runs.setdefault((run["entrant"], run["workload"]), []).append(run)
    medians: dict[str, dict[str, dict[str, Any]]] = {}
    for (entrant, workload), those in runs.items():
        quiet = [run for run in those if run["others"] <= QUIET]
        figures: dict[str, list[float]] = {}
        for run in quiet or those:
            for measure, value in run["measures"].items():
                figures.setdefault(measure, []).append(value)
        rounded = {measure: float(f"{statistics.median(values):.4g}") for measure, values in figures.items()}
        medians.setdefault(entrant, {})[workload] = {"quiet": bool(quiet), **rounded}
    kept = {name: result[name] for name in KEPT}
    return kept | {"rates": result.get("rates", {}), "medians": medians}


def median(record: Record, entrant: str, workload: str, measure: str) -> Median | None:
    """None if the entrant did not get through the workload."""
    found = record["medians"].get(entrant, {}).get(workload, {})
    return Median(found[measure], found["quiet"]) if measure in found else None


def kind_of(record: Record) -> str:
    """The kind of processor, as a column is called: its name and the instruction sets that tell it from others."""
    cpu, names = record["machine"]["cpu"], record["machine"]["instructions"]
    special = ", ".join(name for name in names if IMPLIED.get(name) not in names)
    return f"{cpu} ({special or 'instruction sets unknown'})"


def join(older: Record, newer: Record) -> Record:
    """Two races on one kind of processor as one: where both have a figure, the newer one's; of each rate the better one."""
    entrants = {each["name"]: each for each in (*older["entrants"], *newer["entrants"])}
    medians = {
        name: older["medians"].get(name, {}) | newer["medians"].get(name, {})
        for name in older["medians"] | newer["medians"]
    }
    rates = {
        name: max(older["rates"].get(name, 0), newer["rates"].get(name, 0)) for name in older["rates"] | newer["rates"]
    }
    return newer | {
        "workloads": dict(sorted((older["workloads"] | newer["workloads"]).items())), "entrants": [*entrants.values()],
        "medians": medians, "rates": rates, "missing": _without_repeats(older["missing"] + newer["missing"]),
        "problems": _without_repeats(older["problems"] + newer["problems"]),
    }  # fmt: skip


def joined(records: list[Record]) -> list[Record]:
    """One for each kind of processor, in the order in which they come first."""
    kinds: dict[str, Record] = {}
    for record in records:
        kind = kind_of(record)
        kinds[kind] = join(kinds[kind], record) if kind in kinds else record
    return [*kinds.values()]


def save(record: Record, folder: Path) -> Path:
    """Write it, instead of what is there of the same kind of processor."""
    path = folder / (re.sub(r"[^a-z0-9]+", "-", kind_of(record).lower()).strip("-") + ".json")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def stored(folder: Path) -> list[Record]:
    """All that were kept, the fewest instruction sets first. Raises OSError, ValueError."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(records, key=lambda record: len(record["machine"]["instructions"]))


def _without_repeats(items: list[Any]) -> list[Any]:
    return [item for index, item in enumerate(items) if item not in items[:index]]
