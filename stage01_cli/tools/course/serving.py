"""`serve`: the real server with the reader's part in the place of the project's own, a load that puts the part to the test, and the first
difference from the reference's run. `compare`: both servers side by side, with a stopwatch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stage01_cli.tools.course.differences import of_answers, of_decisions, of_settings, plain
from stage01_cli.tools.course.exercised import COUNTS, exercised, in_words, missing
from stage01_cli.tools.course.exercises import ROOT, Exercise, in_project
from stage01_cli.tools.course.load import SILENCE, Answer, SilentError, ask_all, clients, for_the_engine
from stage01_cli.tools.course.own import open_names
from stage01_cli.tools.own_server import MARK, OwnServer, own_server
from stage03_engine.errors import ConfigError, EngineStartError
from stagetrace import read_run
from stagetrace.check.difference import compare
from stagetrace.check.invariants import check

DOOR = Path(__file__).parent / "door"
PACE = Path(__file__).parent / "pace.py"
PACED = ("stage03_engine.core.engine_core_proc", "EngineCoreProc")
LOAD = "STAGES_LOAD"
ALWAYS = ("--num-gpu-blocks-override", "64", "--prefix-caching-hash-seed", "recorded", "--trace-prompts")
"""Flags of every server here: the same load then leads to the same decisions. Those of an exercise come after them."""
RECORDED = ROOT / "trace" / "recorded"
WIDTH = 100
RULES = 2  # broken ones that are shown
CLIENTS, ROUNDS, TOKENS = 4, 5, 32


def door(parts: list[tuple[str, str, Path]], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment in which each process puts these parts, (module, name, file), in the place of the project's own. The file may not
    ask the project's own for the functions in `keep`."""
    listed = [
        {
            "module": module,
            "name": name,
            "file": str(file.resolve()),
            "keep": [each for each in keep if each.partition(".")[0] == name],
        }
        for module, name, file in parts
    ]
    path = [str(DOOR), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"STAGES_PARTS": json.dumps(listed), "PYTHONPATH": os.pathsep.join(path)}


def parts_of(exercise: Exercise, solution: Path) -> list[tuple[str, str, Path]]:
    """What the exercise plugs in through the door."""
    where = [reference.partition(":") for reference in exercise.parts.values() if reference]
    # what replaces nothing is named by a flag: the door then only makes a module of the file
    return [(module, name, solution) for module, _, name in where] or [("", "", solution)]


def behind_the_door(exercise: Exercise, solution: Path | None) -> Path | None:
    """The file whose parts a server gets. The reference of an open-ended exercise comes through the door like a solution."""
    return solution or (exercise.own_reference if exercise.own_reference.is_file() else None)


def flags_of(exercise: Exercise, solution: Path | None) -> list[str]:
    """The flags of the server; an exercise may make some for the solution that is served (None: the reference). `{part}` in a flag
    is the module behind the door."""
    file = behind_the_door(exercise, solution)
    part = f"student_{file.stem}" if file else ""
    flags = [*ALWAYS, *(flag.replace("{part}", part) for flag in exercise.serve.flags)]
    if exercise.serve.prepare:
        module, _, name = exercise.serve.prepare.partition(":")
        flags += getattr(importlib.import_module(module), name)(solution)
    return flags


@contextmanager
def serving(
    exercise: Exercise, solution: Path | None, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[OwnServer]:
    """The real server with a solution, or with the reference. With STAGES_LOAD in the environment its engine keeps a load's pace."""
    file, environment = behind_the_door(exercise, solution), environment or {}
    parts = parts_of(exercise, file) if file else []
    if LOAD in environment:
        parts.append((*PACED, PACE))
    through = door(parts, open_names(exercise) if solution else ()) if parts else {}
    variables = {**exercise.serve.environment, **environment, **through}
    with own_server("gpt2-tiny", [*flags_of(exercise, solution), *flags], variables) as server:
        yield server


@dataclass(frozen=True)
class Run:
    """A load that was served and recorded."""

    trace: Path
    answers: dict[str, Answer]
    said: list[str]  # by the door, and by the engine that keeps the pace

    @property
    def in_vain(self) -> list[str]:
        """What the engine waited for and never came."""
        return [line.removeprefix(MARK).strip() for line in self.said if " waited in vain " in line]

    @property
    def borrowed(self) -> list[str]:
        """Where the part had its answer from the reference."""
        return borrowed(self.said)

    @property
    def doors(self) -> list[str]:
        """Which parts came in, in which process."""
        return [line for line in self.said if " is now the one in " in line and str(PACE) not in line]


def borrowed(said: Iterable[str]) -> list[str]:
    """Of what the door has said, where a part had its answer from the reference."""
    return [line.removeprefix(MARK).strip() for line in said if line.startswith(f"{MARK} Write ")]


def record(exercise: Exercise, solution: Path | None, folder: Path) -> Run:
    """Serve the load and record it in `folder`."""
    serve, config = exercise.serve, folder.with_name(f"{exercise.name}.config.yaml")
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--trace", str(folder)]
    if serve.config:
        config.write_text(json.dumps(serve.config), encoding="utf-8")  # JSON is YAML
        flags += ["--config", str(config)]
    environment = {LOAD: for_the_engine(serve.load, serve.together)} if serve.pace == "engine" else {}
    server: OwnServer | None = None
    try:
        with serving(exercise, solution, *flags, environment=environment) as server:
            answers = ask_all(server, serve.load, serve.pace)
    except SilentError as error:
        if solution is None:
            raise
        line = f"your part has been computing for {SILENCE:.0f} s, and no answer went on; does it loop? ({in_project(solution)})"
        raise EngineStartError(line) from error
    except EngineStartError as error:
        if solution and server and (calls := borrowed(server.marked)):  # it may have died of that
            raise ConfigError(f"{in_project(solution)}: {calls[0]}") from error
        raise EngineStartError(in_short(str(error).splitlines(), server.log if server else [], solution)) from error
    return Run(folder, answers, server.marked)


def in_short(said: list[str], log: list[str], solution: Path | None) -> str:
    """Why a server did not start or died: in a line, with the line of the part where it happened, if the log or the error shows one."""
    first, *others = [line for line in said if not line.startswith(MARK)]
    where = ""
    if solution is not None:
        mark, lines = f'File "{solution.resolve()}", line ', [*said, *log]
        for number, line in enumerate(lines):
            if mark in line:
                place = line.partition(mark)[2].partition(",")[0]
                raised = next((each for each in lines[number + 1 :] if each and not each[0].isspace()), "")
                where = f": {raised} ({in_project(solution)}, line {place})"
        where = where or why(log, solution)
    line = " ".join([first, *others[-1:]])
    return line.removesuffix(".") + where if where else line


def why(log: list[str], solution: Path) -> str:
    """Why an engine ended, where the log shows no line of the part: it returned something wrong, or ended the process."""
    for line in reversed(log):
        name, colon, _ = line.partition(": ")
        if colon and name.replace(".", "_").isidentifier() and name.endswith(("Error", "Exception")):
            hint = "; is a `return` missing?" if "NoneType" in line else ""
            return f": {line} (with {in_project(solution)}{hint})"
    for line in reversed(log):
        _, ended, code = line.partition(" ended unexpectedly (exit code ")
        if ended:
            number = code.partition(")")[0]
            return f": its process ended with exit code {number}; does {in_project(solution)} end it, with exit() or os._exit()?"
    return ""


def served(exercise: Exercise, solution: Path, work: Path) -> bool:
    """Serve the load with the part, and say what that has exercised and whether it differs from the reference's run; True if it proves
    the part."""
    load = exercise.serve.load
    print(f"starting the server with {in_project(solution)} ...", flush=True)
    own = record(exercise, solution, work / f"{exercise.name}.trace")
    if own.borrowed:
        raise ConfigError(f"{in_project(solution)}: {own.borrowed[0]}")
    for line in own.doors:
        print(line.replace(f"{ROOT}{os.sep}", ""))
    if exercise.parts and any(exercise.parts.values()) and not own.doors:
        raise ConfigError("no process of the server imported what your part replaces; the answers came without it")
    print(f"asked {len(load)} requests (the load in {in_project(exercise.folder / 'exercise.toml')}):")
    for ask in load:
        print(f"  {ask.name}: {shortened(str(own.answers[ask.name]))}")
    print("starting the server with the reference, for the same ...", flush=True)
    right = record(exercise, None, work / f"{exercise.name}.reference.trace")
    print(f"A = the reference ({in_project(right.trace)}), B = yours ({in_project(own.trace)})")
    found = exercised(own.trace, load, own.answers)
    shown = {name: found.get(name, 0) for name in exercise.serve.exercises}
    print(textwrap.fill(f"exercised: {in_words(shown)}", 120, subsequent_indent="  ", break_on_hyphens=False))
    same = True
    for line in differences(exercise, right, own):
        same = False
        print(line)
    checked = finds_nothing(exercise, solution, own.trace)
    if not same:
        print(f"more: stages trace diff {in_project(right.trace)} {in_project(own.trace)}")
        return False
    if short := missing(exercise.serve.exercises, found):
        print("\n".join(["no difference, but no proof either: this run did not put the part to the test", *short]))
        return False
    print(agreement(exercise, own, found))
    return checked


def agreement(exercise: Exercise, own: Run, found: dict[str, int]) -> str:
    """What is the same in both runs, and what was not compared."""
    answers = f"the same {len(own.answers)} answers"
    if exercise.serve.compare == "answers":
        return f"no difference: {answers}, and no rule of `stages trace check` is broken; the decisions are yours, and may differ"
    return f"no difference: the same decisions in {found.get('steps', 0)} steps, {answers}"


def shortened(text: str) -> str:
    """At most a line."""
    return text if len(text) <= WIDTH else f"{text[: WIDTH // 2]} ... {text[-WIDTH // 2 :]}"


def differences(exercise: Exercise, right: Run, own: Run) -> Iterator[str]:
    """What differs, the first of each kind; nothing if nothing does."""
    yield from own.in_vain
    yield from of_settings(right.trace, own.trace)
    found = (
        []
        if exercise.serve.compare == "answers"
        else list(of_decisions(compare(right.trace, own.trace), right.trace, own.trace))
    )
    yield from found
    if found or exercise.serve.compare == "answers":
        yield from (f"your trace breaks a rule: {plain(str(each))}" for each in check(own.trace).findings[:RULES])
    yield from of_answers(right.answers, own.answers)
    theirs, mine = (exercised(each.trace, exercise.serve.load, each.answers) for each in (right, own))
    for name in exercise.serve.no_less:
        if mine.get(name, 0) < theirs.get(name, 0):
            yield f"fewer {COUNTS[name]}: A {theirs[name]}, B {mine.get(name, 0)}"


def finds_nothing(exercise: Exercise, solution: Path, own: Path) -> bool:
    """Give the run to the reader's own check, if the exercise asks for one."""
    if not exercise.serve.after:
        return True
    spec = importlib.util.spec_from_file_location(solution.stem, solution)
    assert spec is not None and spec.loader is not None
    sys.modules[solution.stem] = module = importlib.util.module_from_spec(spec)
    events = [event for event in read_run(own).events if event.proc.startswith("EngineCore")]
    try:
        spec.loader.exec_module(module)
        found = getattr(module, exercise.serve.after)(events)
    except (Exception, SystemExit) as error:
        last = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(solution)]
        where = f"{in_project(solution)}, line {last[-1]}" if last else in_project(solution)
        raise ConfigError(f"your {exercise.serve.after}(): {type(error).__name__}: {error} ({where})") from error
    print(f"your {exercise.serve.after}() of the engine's {len(events)} events: {found or 'nothing found'}")
    return not found


@dataclass(frozen=True)
class Measured:
    """A quantity, of the reference and of the reader's part: medians of alternating rounds, and the ratio of each round."""

    name: str
    reference: float
    own: float
    ratios: list[float]


def measured(exercise: Exercise, solution: Path) -> list[Measured]:
    """Rounds in which clients ask both servers for the same, one server after the other."""
    with serving(exercise, None) as reference, serving(exercise, solution) as own:
        rounds = [[_round(server, exercise) for server in (reference, own)] for _ in range(ROUNDS + 1)][1:]
    names = ("tokens/s", "TTFT, ms", "the whole answer, ms")
    found = []
    for i, name in enumerate(names):
        theirs, mine = ([each[side][i] for each in rounds] for side in (0, 1))
        ratios = [b / a for a, b in zip(theirs, mine)]
        found.append(Measured(name, statistics.median(theirs), statistics.median(mine), ratios))
    return found


def _round(server: OwnServer, exercise: Exercise) -> tuple[float, float, float]:
    """Clients ask at once: tokens per second of all, median TTFT and median time of a whole answer, both in ms."""
    asked = next(ask for ask in exercise.serve.load if ask.for_engine)
    body = asked.sent() | {"max_tokens": TOKENS}

    def ask(number: int) -> tuple[float, float, int]:
        began, first, pieces = time.perf_counter(), 0.0, 0
        for _ in server.complete(body, f"c{number}"):
            first, pieces = first or time.perf_counter() - began, pieces + 1
        return first, time.perf_counter() - began, pieces

    began = time.perf_counter()
    with clients(server, CLIENTS) as pool:
        answers = list(pool.map(ask, range(CLIENTS)))
    seconds = time.perf_counter() - began
    firsts, wholes = (1000 * statistics.median(each[i] for each in answers) for i in (0, 1))
    return CLIENTS * TOKENS / seconds, firsts, wholes
