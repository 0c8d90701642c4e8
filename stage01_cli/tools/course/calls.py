"""The course: rebuild a part, have it judged, and let it serve. In a terminal `stages course check 5`; in a notebook the same as
a call:

    import stage01_cli.tools.course as course
    course.check(5)

Each function prints what the command prints. Raises ConfigError where the command would end with one line.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

from stage01_cli.tools.course import table
from stage01_cli.tools.course.exercises import ROOT, WORK, Exercise, exercises, find, in_project, next_line
from stage03_engine.errors import ConfigError
from stagetrace.terminal import width_of_output

POLL_SECONDS = 0.5


def list_exercises(work: Path = WORK) -> None:
    """What there is to do."""
    done = table.read(work)
    print(f"{'':4}{'exercise':40}{'phase':>5}{'minutes':>9}{'points':>8}  state")
    for each in exercises().values():
        row = done.get(each.name, table.Done())
        print(f"{each.number:>2}  {each.title:40}{each.phase:>5}{each.minutes:>9}{each.points:>8}  {_state(row)}")


def _state(done: table.Done) -> str:
    if done.passed:
        return "passed, served" if done.served else "passed"
    return "begun" if done.started else ""


def start(what: str | int, work: Path = WORK, again: bool = False) -> Path:
    """Copy the starter into `work/`. Raises ConfigError if you have begun already, unless `again`: then your file is kept beside
    it, with the ending .old."""
    exercise = find(what)
    solution = exercise.solution(work)
    if solution.exists() and not again:
        raise ConfigError(
            f"{in_project(solution)} is there already; --again begins anew, and keeps it as {solution.name}.old"
        )
    work.mkdir(parents=True, exist_ok=True)
    if solution.exists():
        solution.replace(solution.with_name(f"{solution.name}.old"))
    shutil.copyfile(exercise.starter, solution)
    table.update(work, exercise.name, lambda done: setattr(done, "started", done.started or table.now()))
    print(f"exercise {exercise.number}, {exercise.title.lower()}: {exercise.goal}")
    print(f"read   {in_project(exercise.folder / 'README.md')}")
    print(f"write  {in_project(solution)}")
    print(f"then   {next_line('check', exercise, work)}")
    return solution


def check(what: str | int, work: Path = WORK, speed: bool = False) -> bool:
    """Judge your file; True if it passes. Then its `speed` is measured, if asked for. Raises ConfigError for an exercise that has none."""
    from stage01_cli.tools.course.speed import required
    from stage01_cli.tools.course.verdict import judge, report

    exercise = find(what)
    if speed:
        required(exercise)
    solution = _own(exercise, work)
    verdict = judge(exercise, solution, speed=speed)

    def count(done: table.Done) -> None:
        done.checks += 1
        done.passed = (done.passed or table.now()) if verdict.passed else ""

    table.update(work, exercise.name, count)
    print(report(exercise, solution, verdict), flush=True)
    return verdict.passed


def _own(exercise: Exercise, work: Path) -> Path:
    solution = exercise.solution(work)
    if not solution.is_file():
        raise ConfigError(f"{in_project(solution)} is not there; `{next_line('start', exercise, work)}` makes it")
    return solution


def _finished(exercise: Exercise, work: Path) -> Path:
    """The file of somebody who wants it to serve. Raises ConfigError, in one line, for one that is not written, or not their own."""
    from stage01_cli.tools.course.own import problem, unwritten

    solution, way = _own(exercise, work), next_line("check", exercise, work)
    try:
        missing = unwritten(exercise, solution)
    except SyntaxError as error:
        raise ConfigError(f"{in_project(solution)}, line {error.lineno}: {error.msg}") from error
    if found := problem(exercise, solution):
        first, *others = found[1].splitlines()
        more = f" ({len(others)} more of this kind; `{way}` names all)" * bool(others)
        raise ConfigError(f"{in_project(solution)}: {first}{more}")
    if missing:
        more = f", and neither is the rest ({len(missing) - 1})" * (len(missing) > 1)
        raise ConfigError(f"{in_project(solution)}: {missing[0]} is not written yet{more}; `{way}` leads you through")
    return solution


def watch(what: str | int, work: Path = WORK, speed: bool = False) -> None:
    """Check again whenever your file is saved, until it passes."""
    solution = _own(find(what), work)
    while True:
        seen = solution.stat().st_mtime_ns
        if check(what, work, speed):
            return
        print(f"waiting for the next version of {in_project(solution)}; Ctrl-C ends this", flush=True)
        while not solution.exists() or solution.stat().st_mtime_ns == seen:  # an editor may replace the file
            time.sleep(POLL_SECONDS)


def hint(what: str | int, work: Path = WORK) -> None:
    """The next hint, and those that you had."""
    exercise = find(what)

    def count(done: table.Done) -> None:
        done.hints = min(done.hints + 1, len(exercise.hints))

    had, width = table.update(work, exercise.name, count).hints, min(100, width_of_output())
    for number, text in enumerate(exercise.hints[:had], start=1):
        for line in f"hint {number} of {len(exercise.hints)}: {text}".splitlines():
            print(textwrap.fill(line, width, break_on_hyphens=False, subsequent_indent="  "))
    if had == len(exercise.hints):
        print("no more hints")
        own = [in_project(exercise.own_reference)] if exercise.own_reference.is_file() else []
        if not (ROOT / "HANDOUT.md").exists():
            print("the reference:")
            print("\n".join(f"  {place}" for place in own or filter(None, exercise.parts.values())))
        print("what to read, here and in vLLM:")
        print("\n".join(f"  {place}" for place in (*exercise.here, *exercise.vllm)))


def progress(work: Path = WORK) -> None:
    """What you have begun, passed and served, with checks and hints."""
    done = table.read(work)
    print(f"{'':4}{'exercise':30}{'begun':10}{'checks':>7}{'hints':>6} {'passed':11}{'served'}")
    for each in exercises().values():
        if row := done.get(each.name):
            days = [text[:10] for text in (row.started, row.passed, row.served)]
            print(
                f"{each.number:>2}  {each.title:30}{days[0]:10}{row.checks:>7}{row.hints:>6} {days[1]:11}{days[2]}".rstrip()
            )
    passed = [each for each in exercises().values() if done.get(each.name, table.Done()).passed]
    points, all_points = (sum(each.points for each in some) for some in (passed, exercises().values()))
    print(f"passed: {len(passed)} of {len(exercises())}, {points} of {all_points} points")


def serve(what: str | int, work: Path = WORK) -> bool:
    """The real server with your part, a load that puts it to the test, and its trace beside the reference's. True if the load did so and there is
    no difference."""
    from stage01_cli.tools.course.serving import served

    exercise = find(what)
    same = served(exercise, _finished(exercise, work), work)
    if same:
        table.update(work, exercise.name, lambda done: setattr(done, "served", table.now()))
    return same


def compare(what: str | int, work: Path = WORK) -> None:
    """Your part and the reference in two servers side by side: speed, then the difference of their traces."""
    from stage01_cli.tools.course.serving import CLIENTS, ROUNDS, measured

    exercise = find(what)
    rows = measured(exercise, _finished(exercise, work))
    print(f"{CLIENTS} clients at once, medians of {ROUNDS} alternating rounds")
    print(f"{'':24}{'reference':>12}{'yours':>12}{'ratio':>8}  lowest and highest of a round")
    for row in rows:
        ratio = f"{row.own / row.reference:>8.2f}  {min(row.ratios):.2f} to {max(row.ratios):.2f}"
        print(f"{row.name:24}{row.reference:>12.1f}{row.own:>12.1f}{ratio}")
    print("a ratio whose range holds 1 shows no difference")
    serve(what, work)


def handout(folder: Path, numbers: Iterable[int] = ()) -> None:
    """A copy of the project without the answers to these exercises, or to all, and what it withholds."""
    from stage01_cli.tools.course.handouts import write_handout

    written = write_handout(folder, numbers)
    count = sum(len(names) for names in written.functions.values())
    print(
        f"{folder}: the answers to {len(written.some)} exercises are withheld, {count} functions in {len(written.kinds)} files"
    )
    print(
        f"it runs with Python {sys.version_info[0]}.{sys.version_info[1]}; {folder / 'HANDOUT.md'} says what is missing"
    )


def leaderboard(
    folder: Path | None = None,
    work: Path = WORK,
    rounds: int = 3,
    seed: int | None = None,
    requests: int = 24,
    rate: float = 4.0,
    ttft: float = 500.0,
    tpot: float = 50.0,
) -> None:
    """Engines of exercise 16 under one load: yours, or those in a folder of submissions, beside the reference and the project's own. Who answers
    wrongly is out; the others are ranked by the requests per second that they serve within `ttft` and `tpot` milliseconds."""
    from stage01_cli.tools.course import ranking as board

    load = board.Load(board.any_seed() if seed is None else seed, requests, rate, ttft, tpot)
    exercise = find(16)
    own = _finished(exercise, work) if folder is None and exercise.solution(work).is_file() else None
    entrants = board.entrants(folder, own)
    for line in board.play(entrants, load, rounds):
        print(line, flush=True)
    print(
        f"\n{requests} requests, {rate:g} per second, in time: TTFT {ttft:g} ms and TPOT {tpot:g} ms; --seed {load.seed}"
    )
    print(f"medians of {rounds} alternating rounds, ratio to the project's own in the same round; {board.machine()}")
    print("\n".join(board.table(entrants)))


def grade(
    folder: Path,
    csv: str | None = None,
    jobs: int = 0,
    due: str | None = None,
    late: float = 0.0,
    partial: bool = False,
    results: Path | None = None,
    speed: bool = False,
) -> None:
    """Judge a folder of submissions, each in a sandbox: a table, or with `csv` the same as CSV in that file ("-": printed). What was
    written after the time `due` is marked, and loses `late` percent of its points for each day that has begun. With `partial` a part that
    does not pass has points for the sentences of its contract that it keeps. `results` is the file that Gradescope reads; the folder is one student's.
    `speed` measures what passes, of the exercises that have a speed, and earns no points."""
    from stage01_cli.tools.course.grading import due as until, grade as grades, write_csv

    all_grades = grades(folder, jobs, until(due, late), partial, speed)
    if results is not None:
        from stage01_cli.tools.course.gradescope import write_results

        write_results(all_grades, results)
        return
    if csv == "-":
        write_csv(all_grades, sys.stdout)
        return
    if csv is not None:
        with open(csv, "w", encoding="utf-8", newline="") as file:
            write_csv(all_grades, file)
        return
    for each in all_grades:
        lines = [" ".join(line.split()) for line in each.verdict.splitlines()]
        said = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) + (f"speed: {each.speed}" if each.speed else "")
        print(
            f"{each.student:20}{each.exercise:26}{each.points:>5g}  {each.outcome:10}{each.seconds:>6} s  {f'late by {each.late}: ' if each.late else ''}{said}",
            flush=True,
        )
