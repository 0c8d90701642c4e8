"""Turn and turn about: every engine runs a workload once, then every engine once more. What the machine does meanwhile
(another compiler, a browser) falls on all of them, and a repetition that it disturbed is run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from race.entrant import Entrant, Failed
from race.machine import QUIET, Watch, wait_until_quiet
from race.process import Engine

PATIENCE = 10.0  # seconds to wait for a quiet machine before a repetition
IDLE = 0.3
"""Seconds that an engine is awake before it is asked, as a server is: some do in the meantime what a request would otherwise wait for."""


@dataclass(frozen=True)
class Repetition:
    """One run of one workload by one entrant."""

    entrant: str
    precision: str
    workload: str
    round: int
    measures: dict[str, float]
    seconds: float
    others: float  # cores that other processes used meanwhile

    @property
    def quiet(self) -> bool:
        """Nobody else computed."""
        return self.others <= QUIET


@dataclass
class Lane:
    """An entrant's place: its process runs from its first turn on, and is started again after a failure."""

    entrant: Entrant
    start: Callable[[Entrant], Engine]
    engine: Engine | None = None
    retired: bool = False  # it could not be started

    def run(self, workload: str, seed: int) -> dict[str, float]:
        """One repetition, after which the process is paused. Raises Failed; the process is gone then."""
        try:
            engine = self.ready()
            measures = engine.run(workload, seed)
            engine.pause()
            return measures
        except Failed:
            self.close()
            raise

    def ready(self) -> Engine:
        """The process, awake. Raises Failed."""
        if self.engine is not None:
            self.engine.resume()
        else:
            try:
                self.engine = self.start(self.entrant)
            except Failed:
                self.retired = True
                raise
        return self.engine

    def close(self) -> None:
        """End the process."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


@dataclass
class Turns:
    """The rounds, the tries for each turn, and what came of them: `repetitions`, and `problems` of a line each."""

    rounds: int
    tries: int
    say: Callable[[str], None]
    keep: Callable[[Repetition], None]
    problem: Callable[[str], None]

    def run(self, workload: str, lanes: list[Lane]) -> None:
        """Round -1 warms up and is not kept. Who fails is out of this workload."""
        racing = [lane for lane in lanes if not lane.retired]
        for round_ in range(-1, self.rounds):
            for lane in list(racing):
                try:
                    repetition = self.turn(workload, lane, round_)
                except Failed as error:
                    racing.remove(lane)
                    self.problem(f"{lane.entrant.name}, {workload}: {error}")
                    continue
                self.say(line_of(repetition))
                if round_ >= 0:
                    self.keep(repetition)

    def turn(self, workload: str, lane: Lane, round_: int) -> Repetition:
        """The quietest of some tries, and the first quiet one; the warm-up is tried once. Raises Failed."""
        tries = self.tries if round_ >= 0 else 1
        tried: list[Repetition] = []
        while len(tried) < tries and not (tried and tried[-1].quiet):
            tried.append(self._once(workload, lane, round_, len(tried)))
        return min(tried, key=lambda each: each.others)

    def _once(self, workload: str, lane: Lane, round_: int, attempt: int) -> Repetition:
        engine = lane.ready()
        time.sleep(IDLE)
        if self.tries > 1 and round_ >= 0:
            wait_until_quiet(engine.watched, PATIENCE)
        watch, began = Watch(engine.watched), time.perf_counter()
        measures = lane.run(workload, seed=100 * (round_ + 1) + attempt)
        seconds, others = time.perf_counter() - began, watch.others()
        own = lane.entrant
        return Repetition(own.name, own.precision, workload, round_, measures, seconds, others)


@contextmanager
def lanes(entrants: list[Entrant], start: Callable[[Entrant], Engine]) -> Iterator[list[Lane]]:
    """One per entrant; all processes end with the block."""
    track = [Lane(entrant, start) for entrant in entrants]
    try:
        yield track
    finally:
        for lane in track:
            lane.close()


def line_of(repetition: Repetition) -> str:
    """For the screen."""
    figures = ", ".join(f"{value:,.1f} {name}" for name, value in repetition.measures.items())
    noise = "" if repetition.quiet else f" (others used {repetition.others:.1f} cores)"
    turn = f"round {repetition.round + 1}" if repetition.round >= 0 else "warm-up"
    return f"{repetition.workload} {turn}: {repetition.entrant:20} {figures}, {repetition.seconds:.0f} s{noise}"


def as_json(repetition: Repetition) -> dict[str, object]:
    """For the result."""
    return asdict(repetition)
