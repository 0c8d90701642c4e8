"""From repetitions to tables: medians, ours over the best peer of the same precision, Markdown for the READMEs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race.entrant import OURS, PRECISIONS
from race.machine import QUIET

Result = dict[str, Any]
"""What `--out` writes."""
BEGIN, END = "<!-- the race: written by `make race` -->", "<!-- the race ends -->"
ROWS = [
    ("W1", "tokens_per_s", "decode tokens/s"), ("W2", "tokens_per_s", "tokens/s"), ("W3", "ttft_ms", "TTFT, ms"),
    ("W4", "tokens_per_s", "tokens/s"), ("W4", "ttft_ms", "TTFT, ms"), ("W4", "tpot_ms", "TPOT, ms"),
    ("W5", "tokens_per_s", "tokens/s"),
]  # fmt: skip
"""(workload, measure, its name and unit). What ends in `_ms` is better when it is less."""


@dataclass(frozen=True)
class Median:
    """Over the quiet repetitions, or over all where none was quiet."""

    value: float
    quiet: bool

    def __str__(self) -> str:
        digits = 0 if self.value >= 100 else 1 if self.value >= 10 else 2
        return f"{'' if self.quiet else '~'}{self.value:,.{digits}f}"


@dataclass(frozen=True)
class Comparison:
    """Ours beside the best peer of one precision; what is missing is None."""

    ours: Median | None
    peer: Median | None
    peer_name: str
    ratio: float | None  # above 1: ours is ahead

    def __str__(self) -> str:
        ours = str(self.ours or "–")
        if self.peer is None:
            return ours
        ratio = "" if self.ratio is None else f" · **{self.ratio:.2f}**"
        return f"{ours} · {self.peer} {self.peer_name}{ratio}"


def median(result: Result, entrant: str, workload: str, measure: str) -> Median | None:
    """None if the entrant did not get through the workload."""
    runs = [run for run in result["repetitions"] if (run["entrant"], run["workload"]) == (entrant, workload)]
    quiet = [run for run in runs if run["others"] <= QUIET]
    values = [run["measures"][measure] for run in quiet or runs if measure in run["measures"]]
    return Median(statistics.median(values), bool(quiet)) if values else None


def compare(result: Result, precision: str, workload: str, measure: str) -> Comparison:
    """Like for like: only entrants of this precision. The best peer is the fastest in this very measure."""
    less_is_better = measure.endswith("_ms")
    found = {
        (each["engine"], each["name"]): value
        for each in result["entrants"]
        if each["precision"] == precision and (value := median(result, each["name"], workload, measure))
    }
    ours = next((value for (engine, _), value in found.items() if engine == OURS), None)
    peers = {name: value for (engine, name), value in found.items() if engine != OURS}
    if not peers:
        return Comparison(ours, None, "", None)
    pick = min if less_is_better else max
    name = pick(peers, key=lambda each: peers[each].value)
    best = peers[name]
    ratio = None
    if ours is not None:
        ratio = best.value / ours.value if less_is_better else ours.value / best.value
    return Comparison(ours, best, name, ratio)


def summary(result: Result) -> str:
    """The README's table: a row per measure but W4's TPOT, a column per precision with ours, the best peer and the ratio."""
    precisions = _precisions(result)
    rows = [
        [f"{workload} {result['workloads'][workload]}: {unit}"]
        + [str(compare(result, precision, workload, measure)) for precision in precisions]
        for workload, measure, unit in _rows(result)
        if measure != "tpot_ms"
    ]
    return "\n".join([_caption(result), "", *_markdown(["", *precisions], rows)])


def details(result: Result) -> str:
    """Every entrant's medians, with versions, and the lines of those that failed."""
    names = [each["name"] for each in result["entrants"]]
    rows = [
        [f"{workload} {unit}", *(str(median(result, name, workload, measure) or "–") for name in names)]
        for workload, measure, unit in _rows(result)
    ]
    machine = result["machine"]
    about = [
        f"{machine['cpu']} ({', '.join(machine['instructions']) or 'instruction sets unknown'}), {result['threads']} compute "
        f"threads, {machine['memory_gib']} GiB, {machine['system']}; {_versions(result)}; {result['date']}; medians of "
        f"{result['rounds']} rounds.",
        *(f"Settings of ours: {name}={value}." for name, value in result["settings"].items()),
    ]
    is_noisy = any("~" in cell for row in rows for cell in row)
    noisy = ["`~`: other processes computed during every repetition."] if is_noisy else []
    problems = [f"- {problem}" for problem in result["problems"]]
    return "\n".join([*about, *noisy, "", *_markdown(["", *names], rows), *([""] if problems else []), *problems])


def write_between(path: Path, text: str) -> None:
    """Replace what stands between the two markers. Raises ValueError without them."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has not both {BEGIN!r} and {END!r}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _caption(result: Result) -> str:
    machine = result["machine"]
    special = ", ".join(name for name in machine["instructions"] if name not in ("fma", "f16c"))
    shape = "a tiny shape" if result["quick"] else "GPT-2's shape"
    return (
        f"{machine['cpu']} ({special}), {result['threads']} threads, {result['date'][:10]}; {_versions(result)}; {shape} with "
        "random weights. In each cell: ours · the fastest other engine in the same precision · the ratio (above 1: ours is ahead). "
        "`make race` measures here ([how](tests/benchmarks/README.md#the-race))."
    )


def _versions(result: Result) -> str:
    known = {each["engine"]: each["version"] for each in result["entrants"] if each["engine"] != OURS}
    return ", ".join(f"{engine} {version}" for engine, version in known.items()) or "no peer installed"


def _precisions(result: Result) -> list[str]:
    present = {each["precision"] for each in result["entrants"]}
    return [precision for precision in PRECISIONS if precision in present]


def _rows(result: Result) -> list[tuple[str, str, str]]:
    return [row for row in ROWS if row[0] in result["workloads"]]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
