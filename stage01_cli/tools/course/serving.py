"""`serve`: the real server with the reader's part in the place of the project's own, one request, and the first difference of the
two traces. `compare`: both servers side by side, with a stopwatch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage01_cli.tools.course.exercises import ROOT, Exercise, in_project
from stage01_cli.tools.course.own import open_names
from stage01_cli.tools.own_server import OwnServer, own_server
from stage03_engine.errors import ConfigError
from stagetrace import read_run
from stagetrace.check.difference import Lane, Result, StepFacts, compare
from stagetrace.check.reasons import explain, find_request
from stagetrace.errors import TraceError

DOOR = Path(__file__).parent / "door"
MARK = "[course]"
RECORDED = ROOT / "trace" / "recorded"
RECORDED_FLAGS = ("--num-gpu-blocks-override", "64", "--prefix-caching-hash-seed", "recorded", "--trace-prompts")
"""With these, and the flags that trace/record.py names, a server decides as the recorded ones did."""
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
    flags = [*RECORDED_FLAGS, *(flag.replace("{part}", part) for flag in exercise.serve.flags)]
    if exercise.serve.prepare:
        module, _, name = exercise.serve.prepare.partition(":")
        flags += getattr(importlib.import_module(module), name)(solution)
    return flags


@contextmanager
def serving(exercise: Exercise, solution: Path | None, *flags: str) -> Iterator[OwnServer]:
    """The real server with a solution, or with the reference."""
    file = behind_the_door(exercise, solution)
    environment = door(parts_of(exercise, file), open_names(exercise) if solution else ()) if file else {}
    with own_server("gpt2-tiny", [*flags_of(exercise, solution), *flags], environment) as server:
        yield server


def request(exercise: Exercise) -> dict[str, Any]:
    """The request that is traced."""
    serve = exercise.serve
    body = {"prompt": serve.prompt, "max_tokens": serve.max_tokens, "temperature": 0, "ignore_eos": True}
    return body | serve.request


def record(exercise: Exercise, solution: Path | None, folder: Path) -> tuple[str, list[str]]:
    """Serve the request and record it. Returns the text that came, and what the door said."""
    shutil.rmtree(folder, ignore_errors=True)
    with serving(exercise, solution, "--trace", str(folder)) as server:
        text = "".join(server.complete(request(exercise), "r0"))
    return text, [line for line in server.log if line.startswith(MARK)]


def served(exercise: Exercise, solution: Path, work: Path) -> bool:
    """Serve a request with the part, print the answer and the difference; True if there is none."""
    own = work / f"{exercise.name}.trace"
    print(f"starting the server with {in_project(solution)} ...", flush=True)
    text, said = record(exercise, solution, own)
    if calls := [line.removeprefix(MARK).strip() for line in said if line.startswith(f"{MARK} Write ")]:
        raise ConfigError(f"{in_project(solution)}: {calls[0]}")
    for line in said:
        print(line.replace(f"{ROOT}{os.sep}", ""))
    if exercise.parts and any(exercise.parts.values()) and not said:
        raise ConfigError("no process of the server imported what your part replaces; the answer came without it")
    asked = ", ".join(f"{name} {value!r}" for name, value in request(exercise).items())
    print(f"asked:  {asked}")
    print(f"answer: {text!r}")
    if exercise.serve.recorded:
        right = RECORDED / exercise.serve.recorded
    else:
        right = work / f"{exercise.name}.reference.trace"
        expected, _ = record(exercise, None, right)
        if expected != text:
            print(f"the reference's answer: {expected!r}")
    result = compare(str(right), str(own))
    print(f"A = the reference ({in_project(right)}), B = yours ({in_project(own)})")
    for line in differences(result, own):
        print(line)
    return finds_nothing(exercise, solution, own) and result.same


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


def differences(result: Result, own: Path) -> Iterator[str]:
    """The first difference in words, and why yours did what it did there."""
    if result.same:
        decisions = f"the same decisions in {result.num_steps[1]} steps, " if result.num_steps[1] else ""
        yield f"no difference: {decisions}the same answer"
        return
    for lane in result.steps.values():
        yield from _of_step(lane, own)
    for name, lane in result.requests.items():
        yield f"{name}, its event {lane.place + 1}:"
        yield f"  A: {lane.a or 'has ended'}"
        yield f"  B: {lane.b or 'has ended'}"
    yield f"more: stages trace show {in_project(own)} --req r0"


def _of_step(lane: Lane, own: Path) -> Iterator[str]:
    sides = [item if isinstance(item, StepFacts) else None for item in (lane.a, lane.b)]
    number = next(side.step for side in sides if side is not None)
    yield f"step {number} is the first that differs:"
    facts = [side.facts if side is not None else [] for side in sides]
    for label, mine, other in zip("AB", facts, reversed(facts)):
        for fact in [fact for fact in mine if fact not in other]:
            yield f"  {label} does: {fact}"
    if sides[1] is None:
        yield "  B has ended before"
    else:
        yield from (f"  why: {line}" for line in _why(own, number))


def _why(own: Path, number: int) -> Iterator[str]:
    """What the trace says of the request in this step."""
    try:
        steps = list(explain(str(own), find_request(str(own), "r0")))
    except TraceError as error:
        yield str(error)
        return
    for step in steps:
        if step.step == number:
            for reason in step.reasons:
                yield f"{reason.text} (rule: {reason.places})"


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
    body = request(exercise) | {"max_tokens": TOKENS}

    def ask(number: int) -> tuple[float, float, int]:
        began, first, pieces = time.perf_counter(), 0.0, 0
        for _ in server.complete(body, f"c{number}"):
            first, pieces = first or time.perf_counter() - began, pieces + 1
        return first, time.perf_counter() - began, pieces

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(ask, range(CLIENTS)))
    seconds = time.perf_counter() - began
    firsts, wholes = (1000 * statistics.median(each[i] for each in answers) for i in (0, 1))
    return CLIENTS * TOKENS / seconds, firsts, wholes
