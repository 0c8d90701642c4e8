"""`--speed`: how long a part that passes takes beside its plain twin and the reference, in one process and in alternating rounds, so
that what else the machine does falls on all three alike. What is measured stands in `[speed]` of an `exercise.toml`.

The tests' process measures, in the sandbox of `grade` too, and the ratios come with the verdict, sealed as it is (sealed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from stage01_cli.tools.course.exercises import Exercise, exercises
from stage03_engine.errors import ConfigError

ROUNDS = 7
CALLS = 2  # in a round, of which the faster counts: the machine may have done something else during the other
LIMIT = 50.0  # seconds for all rounds; the pass stays, whatever they take
OWN, REFERENCE, TWIN = "yours", "reference", "twin"

Work = Callable[[int], Callable[[], Any]]
"""Makes the call that is timed, from its number: each brings other tensors, so nothing is gained by keeping an answer."""


class Different(Exception):
    """A result that is not the twin's: whatever is fast, this is not right."""


def required(exercise: Exercise) -> None:
    """Raises ConfigError for an exercise whose speed nobody measures."""
    if exercise.speed is None:
        raise ConfigError(f"exercise {exercise.number} has no speed to measure; --speed is for {_numbers()}")


def required_of_one(some: list[Exercise]) -> None:
    """Raises ConfigError if none of these has a speed."""
    if not any(each.speed for each in some):
        raise ConfigError(f"nothing here has a speed to measure; --speed is for {_numbers()}")


def _numbers() -> str:
    return "exercises " + " and ".join(str(each.number) for each in exercises().values() if each.speed)


def measured(
    works: dict[str, Work], same: Callable[[Any, Any], bool], clock: Callable[[], float] = perf_counter
) -> dict[str, list[float]]:
    """The ratios of OWN and REFERENCE to TWIN, one per round; each begins one round in three. A round before them, in which caches fill, does
    not count. Raises Different for a result that is not the twin's, and whatever a part raises."""
    names, ratios = [TWIN, REFERENCE, OWN], dict[str, list[float]]({OWN: [], REFERENCE: []})
    for turn in range(ROUNDS + 1):
        first = turn % len(names)
        fastest = dict.fromkeys(names, float("inf"))
        for number in range(CALLS * turn, CALLS * (turn + 1)):
            results = dict[str, Any]()
            for name in names[first:] + names[:first]:
                call = works[name](number)
                began = clock()
                results[name] = call()
                fastest[name] = min(fastest[name], clock() - began)
            if not same(results[OWN], results[TWIN]):
                raise Different("its result in the batch that is timed is not the twin's")
        for name in ratios if turn else ():
            ratios[name].append(fastest[name] / max(fastest[TWIN], 1e-9))
    return ratios


def taken(lines: list[dict[str, Any]]) -> str:
    """What the line about the speed says, in words; it is the last of the tests' lines, and is taken from them. The number comes first."""
    if not lines or "speed" not in lines[-1]:
        return f"none: not measured within {LIMIT:.0f} s"
    found = lines.pop()["speed"]
    if isinstance(found, str):
        return f"none: {found}"
    own, reference = found[OWN], found[REFERENCE]
    spread = f"median of {len(own)} alternating rounds, {_short(min(own))} to {_short(max(own))}"
    return f"{_short(median(own))} x the plain twin's time ({spread}); the reference: {_short(median(reference))} x"


def _short(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:.0f}"
