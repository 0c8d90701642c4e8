"""From records to tables: ours over the best peer of the same precision, how far from the limit, Markdown for the READMEs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from race.entrant import CANNOT, OURS, PEERS, PRECISIONS
from race.limits import limits_of
from race.record import Median, Record, kind_of, median
from race.workloads import FULL, QUICK

BEGIN, END = "<!-- the race: written by `make race` -->", "<!-- the race ends -->"
ROWS = [
    ("W1", "tokens_per_s", "decode tokens/s"), ("W2", "tokens_per_s", "tokens/s"), ("W3", "ttft_ms", "TTFT, ms"),
    ("W4", "tokens_per_s", "tokens/s"), ("W4", "ttft_ms", "TTFT, ms"), ("W4", "tpot_ms", "TPOT, ms"),
    ("W5", "tokens_per_s", "tokens/s"),
]  # fmt: skip
"""(workload, measure, its name and unit). What ends in `_ms` is better when it is less."""
LEGEND = (
    "In each cell, by precision: ours · the fastest other engine in the same precision · **the ratio** (above 1: ours is "
    "ahead) · ours in per cent of [what the machine admits](tests/benchmarks/README.md#the-limit); without: took no part, or failed; `–`: not "
    "measured. "
    "`make race` measures here ([how](tests/benchmarks/README.md#the-race))."
)


@dataclass(frozen=True)
class Comparison:
    """Ours beside the best peer of one precision; what is missing is None."""

    ours: Median | None
    peer: Median | None
    peer_name: str  # with its own word for the precision
    ratio: float | None  # above 1: ours is ahead
    share: float | None = None  # of what the machine admits, ours
    without: tuple[str, ...] = ()  # engines that might have been faster

    def __str__(self) -> str:
        if self.ours is None and self.peer is None:
            return "–"
        parts = [str(self.ours or "–")]
        if self.peer is not None:
            parts.append(f"{self.peer} {self.peer_name}")
        if self.ratio is not None:
            parts.append(f"**{self.ratio:.2f}**")
        if self.share is not None:
            parts.append(f"{100 * self.share:.0f} %")
        return " · ".join(parts) + (f" (without {', '.join(self.without)})" if self.without else "")


def compare(record: Record, precision: str, workload: str, measure: str) -> Comparison:
    """Like for like: only entrants of this precision. The best peer is the fastest in this very measure."""
    found = {
        (each["engine"], each["name"]): value
        for each in record["entrants"]
        if each["precision"] == precision and (value := median(record, each["name"], workload, measure))
    }
    ours = next((value for (engine, _), value in found.items() if engine == OURS), None)
    share = share_of(record, precision, workload, measure, ours)
    peers = {name: value for (engine, name), value in found.items() if engine != OURS}
    without = absent(record, precision, workload, {engine for engine, _ in found})
    if not peers:
        return Comparison(ours, None, "", None, share, without)
    less_is_better = measure.endswith("_ms")
    pick = min if less_is_better else max
    name = pick(peers, key=lambda each: peers[each].value)
    best, ratio = peers[name], None
    if ours is not None:
        ratio = best.value / ours.value if less_is_better else ours.value / best.value
    return Comparison(ours, best, name.removesuffix(f" {precision}"), ratio, share, without)


def absent(record: Record, precision: str, workload: str, present: set[str]) -> tuple[str, ...]:
    """The peers that take part in this precision and have no figure here: not installed, not asked, without a server, or failed."""
    here = {each["engine"] for each in record["entrants"] if each["precision"] == precision}
    here |= {
        each["engine"]
        for each in record["missing"]
        if each["precision"] in ("", precision) and each["workload"] in ("", workload)
    }
    return tuple(
        f"{engine}'s server" if _has_no_server(record, engine, workload) else engine
        for engine, precisions in PEERS.items()
        if engine in here - present and precision in precisions and (engine, workload) not in CANNOT
    )


def share_of(record: Record, precision: str, workload: str, measure: str, own: Median | None) -> float | None:
    """A figure as a part of the limit; None without measured rates."""
    if own is None or not record["rates"]:
        return None
    limit = limits_of(QUICK if record["quick"] else FULL, precision, record["rates"])[workload, measure]
    return limit / own.value if measure.endswith("_ms") else own.value / limit


def summary(record: Record) -> str:
    """For the screen: a row per measure, a column per precision with ours, the best peer and the ratio."""
    precisions = _precisions(record)
    rows = [
        [f"{workload} {record['workloads'][workload]}: {unit}"]
        + [str(compare(record, precision, workload, measure)) for precision in precisions]
        for workload, measure, unit in _rows([record])
    ]
    return "\n".join([_caption(record) + ".", "", *_markdown(["", *precisions], rows)])


def across(records: list[Record]) -> str:
    """README's table: a row per measure but W4's TPOT, a column per kind of processor, in each cell a line per precision."""
    titles = {name: title for record in records for name, title in record["workloads"].items()}
    rows = [
        [f"{workload} {titles[workload]}: {unit}", *(_cell(record, workload, measure) for record in records)]
        for workload, measure, unit in _rows(records)
        if measure != "tpot_ms"
    ]
    captions = "; ".join(_caption(record) for record in records)
    head = ["", *(kind_of(record) for record in records)]
    return "\n".join([f"{captions}; GPT-2's shape with random weights. {LEGEND}", "", *_markdown(head, rows)])


def _cell(record: Record, workload: str, measure: str) -> str:
    lines = {precision: str(compare(record, precision, workload, measure)) for precision in PRECISIONS}
    return "<br>".join(f"{precision}: {line}" for precision, line in lines.items() if line != "–") or "–"


def details(records: list[Record]) -> str:
    """A table per kind of processor: a row per entrant and per limit, with versions, and the lines of those that failed."""
    return "\n\n".join(_details(record) for record in records)


def _details(record: Record) -> str:
    machine, tries = record["machine"], record["tries"]
    instructions = ", ".join(machine["instructions"]) or "instruction sets unknown"
    about = [
        f"**{machine['cpu']}** ({instructions}), {record['threads']} compute threads, {machine['memory_gib']} GiB, "
        f"{machine['system']}; {_versions(record)}; {record['date']}; medians of {record['rounds']} rounds, "
        f"{'a single try' if tries == 1 else f'{tries} tries at most'} for each.",
        _rates(record),
        *(f"Settings of ours: {name}={value}." for name, value in record["settings"].items()),
    ]
    rows_of = _rows([record])
    rows = [row for precision in PRECISIONS for row in _entrant_rows(record, precision, rows_of)]
    rows += [
        [f"{each['engine']} {each['precision']}".strip(), *["missing"] * len(rows_of)]
        for each in record["missing"]
        if not each["workload"]
    ]
    is_noisy = any("~" in cell for row in rows for cell in row)
    noisy = ["`~`: other processes computed during every repetition."] if is_noisy else []
    problems = [f"- {problem}" for problem in record["problems"]]
    head = ["", *(f"{workload} {unit}" for workload, _, unit in rows_of)]
    return "\n".join([*about, *noisy, "", *_markdown(head, rows), *([""] if problems else []), *problems])


def _entrant_rows(record: Record, precision: str, rows_of: list[tuple[str, str, str]]) -> list[list[str]]:
    """The entrants of one precision, then its limit."""

    def cell(entrant: dict[str, str], workload: str, measure: str) -> str:
        value = median(record, entrant["name"], workload, measure)
        share = share_of(record, precision, workload, measure, value)
        if value is not None:
            return f"{value}" + ("" if share is None else f" ({100 * share:.0f} %)")
        engine = entrant["engine"]
        return "no server" if (engine, workload) in CANNOT or _has_no_server(record, engine, workload) else "–"

    entrants = [each for each in record["entrants"] if each["precision"] == precision]
    rows = [[each["name"], *(cell(each, workload, measure) for workload, measure, _ in rows_of)] for each in entrants]
    if record["rates"] and entrants:
        limits = limits_of(QUICK if record["quick"] else FULL, precision, record["rates"])
        values = (str(Median(limits[workload, measure], True)) for workload, measure, _ in rows_of)
        rows.append([f"*limit, {precision}*", *(f"*{value}*" for value in values)])
    return rows


def _has_no_server(record: Record, engine: str, workload: str) -> bool:
    return any(
        each["workload"] and (each["engine"], each["workload"]) == (engine, workload) for each in record["missing"]
    )


def _rates(record: Record) -> str:
    rates = dict(record["rates"])
    if not rates:
        return "The machine's rates were not measured, so no figure stands beside its limit."
    memory = f"copies {rates.pop('copy') / 1e9:.1f} GB/s and reads {rates.pop('read') / 1e9:.1f} GB/s"
    products = ", ".join(f"{rate / 1e9:,.0f} in {name}" for name, rate in rates.items())
    return f"It {memory}, and multiplies matrices at 10⁹ operations/s: {products}. In brackets: per cent of the limit."


def write_between(path: Path, text: str) -> None:
    """Replace what stands between the two markers. Raises ValueError without them."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has not both {BEGIN!r} and {END!r}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _caption(record: Record) -> str:
    return f"{kind_of(record)}: {record['threads']} threads, {record['date'][:10]}, {_versions(record)}"


def _versions(record: Record) -> str:
    known = {each["engine"]: each["version"] for each in record["entrants"] if each["engine"] != OURS}
    return ", ".join(f"{engine} {version}" for engine, version in known.items()) or "no peer installed"


def _precisions(record: Record) -> list[str]:
    present = {each["precision"] for each in record["entrants"]}
    return [precision for precision in PRECISIONS if precision in present]


def _rows(records: list[Record]) -> list[tuple[str, str, str]]:
    return [row for row in ROWS if any(row[0] in record["workloads"] for record in records)]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
