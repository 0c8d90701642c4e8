"""The judge of exercise 12: first the rules that every scheduler keeps, then the measures on the load."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from types import ModuleType
from typing import Any
from unittest import mock

from hypothesis import given, strategies as st
from judging import Judge, load as load_file

from stage01_cli.tools.course.exercises import find
from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

judge = Judge(12)
score = load_file(find(12).folder / "score.py")
LATER = 100  # requests that may overtake


@dataclass(frozen=True)
class Small:
    """A load of a few requests, with few seats and blocks."""

    jobs: tuple[tuple[int, int, int], ...]  # (client, prompt, answer), all at once
    budget: int
    seats: int
    blocks: int

    def __repr__(self) -> str:
        requests = "; ".join(
            f"{name(i)} of client {client}: prompt {p}, answer {a}" for i, (client, p, a) in enumerate(self.jobs)
        )
        return f"budget {self.budget}, {self.seats} seats, {self.blocks} blocks of 4; {requests}"

    def load(self) -> Any:
        jobs = [
            score.Job(f"client {client}", name(i), 0, prompt, answer, max_tokens=24)
            for i, (client, prompt, answer) in enumerate(self.jobs)
        ]
        return score.Load(tuple(jobs), self.budget, self.seats, self.blocks, block_size=4, caching=False)


def name(number: int) -> str:
    return chr(ord("a") + number)


@st.composite
def smalls(draw: st.DrawFn) -> Small:
    job = st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 8))
    jobs = draw(st.lists(job, min_size=1, max_size=6))
    longest = max(prompt + answer for _, prompt, answer in jobs)
    return Small(
        tuple(jobs), draw(st.integers(1, 12)), draw(st.integers(1, 4)), -(-longest // 4) + draw(st.integers(0, 4))
    )


FIXED = Small(tuple((i % 3 + 1, 3 + 5 * i % 9, 2 + i % 4) for i in range(9)), budget=8, seats=3, blocks=10)


@judge.settings(60)
@given(small=smalls())
def test_every_step_keeps_the_rules(impl: ModuleType, small: Small) -> None:
    with judge.case(load=small):
        load = small.load()
        run = score.Run(load, load.scheduler(impl.Scheduler))
        watch_orders(run.scheduler)
        number = 0
        for step in run.steps():
            number = step.number
            with judge.case(step=number):
                check_step(small, step)
            if number > 400:
                break
        left = [name for name, each in run.served.items() if each.end < 0]
        judge.holds("ends", not left, f"all of {list(run.served)} within {number} steps", f"{left} have not ended")


def watch_orders(scheduler: Any) -> None:
    """Both orders are looked at whenever they are asked for."""

    def watched(what: str, order: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def asked(requests: list[Any]) -> Any:
            given, got = sorted(each.request_id for each in requests), order(list(requests))
            names = [each.request_id for each in got] if isinstance(got, list) else got
            right = isinstance(names, list) and sorted(names) == given
            judge.holds("orders", right, f"{what}: {given} in any order", names)
            return got

        return asked

    for what in ("waiting_order", "running_order"):
        setattr(scheduler, what, watched(what, getattr(scheduler, what)))


def check_step(small: Small, step: Any) -> None:
    tokens = dict(step.output.num_scheduled_tokens)
    total, running = sum(tokens.values()), len(step.scheduler.running)
    judge.holds("budget", total <= small.budget, f"at most {small.budget} tokens", f"{total} tokens: {tokens}")
    judge.holds("seats", running <= small.seats, f"at most {small.seats} running", f"{running} running")
    for new in step.output.scheduled_new_reqs:
        judge.holds("blocks", not new.num_computed_tokens, f"{new.request_id} starts with no computed token: nothing is cached",
                    f"it starts after {new.num_computed_tokens}")  # fmt: skip
    try:
        check_invariants(step.scheduler)
    except AssertionError as error:
        judge.rejects(
            "blocks", "a place for each computed token", str(error) or "a computed token without a place", error
        )


def test_the_same_load_leads_to_the_same_decisions(impl: ModuleType) -> None:
    with judge.case(load=FIXED):
        first = decisions(impl.Scheduler, FIXED.load())
        decisions(impl.Scheduler, FIXED.load(), most=7)  # one that ends in the middle
        with clocks_that_leap(impl.Scheduler):
            second = decisions(impl.Scheduler, FIXED.load())
        for number, (one, two) in enumerate(zip_longest(first, second), start=1):
            judge.holds("same", one == two, f"in step {number} of a later run: {one}", two)


def decisions(make: Any, load: Any, most: int = 1000) -> list[dict[str, int]]:
    """Who gets how many tokens in each step. Requests are called by their numbers in the load."""
    numbers = {job.name: f"request {number}" for number, job in enumerate(load.jobs)}
    found: list[dict[str, int]] = []
    for step in score.Run(load, load.scheduler(make)).steps():
        found.append({numbers[name]: tokens for name, tokens in step.output.num_scheduled_tokens.items()})
        if len(found) == most:
            break
    return found


CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


@contextmanager
def clocks_that_leap(make: Any) -> Iterator[None]:
    """Each look at a clock finds that minutes have gone by: also where a solution has the clock by a name of its own."""
    draw, now = random.Random(0), [1e6]

    def leap() -> float:
        now[0] += draw.uniform(1, 1000)
        return now[0]

    fakes = dict.fromkeys(CLOCKS, leap) | {f"{name}_ns": lambda: int(leap() * 1e9) for name in CLOCKS}
    theirs = {id(getattr(time, name)): fake for name, fake in fakes.items()}
    names = make.schedule.__globals__
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(time, **fakes))
        found = {name: theirs[id(value)] for name, value in names.items() if id(value) in theirs}
        stack.enter_context(mock.patch.dict(names, found))
        yield


@judge.settings(24)
@given(
    prompt=st.sampled_from([4, 40]),
    others=st.sampled_from(["one other client", "a client each", "its own client"]),
    at=st.sampled_from([0, 240]),
)
def test_nobody_starves(impl: ModuleType, prompt: int, others: str, at: int) -> None:
    """One request arrives with the first of a long stream of short ones, in which always some are waiting, or somewhat later."""
    clients = {
        "one other client": lambda i: "other",
        "a client each": lambda i: f"other {i}",
        "its own client": lambda i: "old",
    }
    stream = [
        score.Job(clients[others](i), f"later {i}", 12 * i, 4, 4, max_tokens=16) for i in range(-4, 2 * LATER + 20)
    ]
    old = score.Job("old", "old", at - 60, prompt, 4, max_tokens=16)
    jobs = tuple(sorted([*stream, old], key=lambda job: job.at))
    load = score.Load(jobs, max_num_batched_tokens=64, max_num_seqs=2, blocks=40, block_size=4)
    waits = f"an old request with a prompt of {prompt}, then every 12 ticks one with a prompt of 4, from {others}"
    waits += ", some of which were there before" if at else ""
    with judge.case(load=waits):
        run = score.Run(load, load.scheduler(impl.Scheduler))
        for _ in run.steps():
            later = [each for each in run.served.values() if each.job.at > at and each.first >= 0]
            if "old" in run.served and run.served["old"].first >= 0:
                break
            judge.holds("starves", len(later) < LATER, f"its first token before {LATER} later ones have theirs",
                        f"none yet in tick {run.now}")  # fmt: skip


def test_it_beats_fcfs(impl: ModuleType) -> None:
    with judge.case(load="load.json: batch, chat and agent"):
        check_measures(impl.Scheduler, score.read_load(), "as_good", "better")


def test_it_beats_fcfs_where_nobody_knows_the_clients(impl: ModuleType) -> None:
    """A class has a load of its own: whoever teaches sets COURSE_SEED."""
    with judge.case(load="another one of the same kind"):
        check_measures(impl.Scheduler, score.load_of(os.environ.get("COURSE_SEED", "")), "hidden", "hidden")


def check_measures(make: Any, load: Any, as_good: str, better: str) -> None:
    own, fcfs = score.score(to_the_end(make, load)), score.score(score.serve(Scheduler, load))
    worse = fcfs.better(own)
    judge.holds(
        as_good, len(worse) <= 1, f"not worse in two measures than {shown(fcfs)}", f"{shown(own)}: worse in {worse}"
    )
    judge.holds(better, bool(own.better(fcfs, by=0.05)), f"one measure 5 % better than {shown(fcfs)}", shown(own))


@dataclass(frozen=True)
class Disguised(score.Job):  # type: ignore[name-defined, misc]
    """The same job, with another prompt and another way to sample."""

    def request(self, number: int) -> Request:
        tokens = [9] * self.shared + [50_000 - number] * (self.prompt - self.shared)
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0.7, top_k=3)
        message = EngineCoreRequest(
            self.name, tokens, params, score.EOS, priority=self.priority, cache_salt=self.client
        )
        return Request(message, seed=number)


def disguised(load: Any) -> Any:
    """The same load under other names. Those of the clients have the same order, should a policy compare them."""
    draw = random.Random(0)
    clients = {
        name: f"{i}{draw.getrandbits(32):08x}" for i, name in enumerate(sorted({job.client for job in load.jobs}))
    }
    jobs = [
        Disguised(**asdict(job) | {"client": clients[job.client], "name": f"{draw.getrandbits(48):012x}"})
        for job in load.jobs
    ]
    return replace(load, jobs=tuple(jobs))


def test_names_and_tokens_change_nothing(impl: ModuleType) -> None:
    load = score.read_load()
    with judge.case(load="load.json, then the same with other names and tokens"):
        pairs = zip_longest(decisions(impl.Scheduler, load), decisions(impl.Scheduler, disguised(load)))
        for number, (one, two) in enumerate(pairs, start=1):
            judge.holds("promised", one == two, f"in step {number}: {one}", two)


def to_the_end(make: Any, load: Any) -> Any:
    try:
        return score.serve(make, load)
    except RuntimeError as error:
        return judge.rejects("ends", "all requests end", str(error), error)


def shown(own: Any) -> str:
    return ", ".join(f"{measure} {value}" for measure, value in asdict(own).items())
