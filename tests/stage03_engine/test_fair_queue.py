"""`--scheduling-policy fair`: the queue against its rules written out slowly, and what they mean for a scheduler."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import count, zip_longest

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from patience import PATIENCE
from server_under_test import ServerProcess
from standstill import LONGEST, Standstill
from toy_runner import MAX_LEN, ToyRunner, make_request, make_scheduler

from stage03_engine.core.features.fair_queue.fair_queue import FairQueue
from stage03_engine.core.request import Request, RequestQueue, RequestStatus
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


class SlowTwin:
    """The rules: a circle of groups that wait, the groups that run, and plain lists of requests."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.circle: list[str] = []
        self.begun: list[str] = []  # the groups that run, by when they began to

    def group(self, request: Request) -> str:
        return request.request_id.partition("_")[2].rpartition("-")[0]

    def of(self, requests: list[Request], name: str) -> list[Request]:
        return sorted((each for each in requests if self.group(each) == name), key=lambda each: each.arrival)

    def tidy(self) -> None:
        self.circle = [name for name in self.circle if self.of(self.waiting, name)]
        self.begun = [name for name in self.begun if self.of(self.running, name)]

    def arrive(self, request: Request) -> None:
        self.waiting.append(request)
        if self.group(request) not in self.circle:
            self.circle.append(self.group(request))

    def admit(self, held: set[str], seats: int) -> list[Request]:
        admitted: list[Request] = []
        while len(admitted) < seats:
            ready = [[r for r in self.of(self.waiting, name) if r.request_id not in held] for name in self.circle]
            offered = next((requests[0] for requests in ready if requests), None)
            if offered is None:
                break
            admitted.append(offered)
            self.waiting.remove(offered)
            self.running.append(offered)
            self.begun += [self.group(offered)] * (self.group(offered) not in self.begun)
            self.circle.remove(self.group(offered))
            self.circle.append(self.group(offered))
            self.tidy()
        return admitted

    def rounds(self) -> list[Request]:
        names = self.begun
        longest = max((len(self.of(self.running, name)) for name in names), default=0)
        places = [[self.of(self.running, name)[place : place + 1] for name in names] for place in range(longest)]
        return [request for place in places for some in place for request in some]

    def preempt(self) -> Request:
        victim = self.rounds()[-1]
        self.running.remove(victim)
        self.waiting.append(victim)
        name = self.group(victim)
        self.circle = [name, *(other for other in self.circle if other != name)]
        self.tidy()
        return victim

    def remove(self, request: Request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.tidy()


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.running, self.twin, self.arrivals = FairQueue(), FairQueue(), SlowTwin(), count()

    @rule(group=st.integers(0, 3), answers=st.integers(1, 5))
    def arrive(self, group: int, answers: int) -> None:
        for _ in range(answers):
            arrival = next(self.arrivals)
            request = make_request(f"{arrival % 2}_cmpl-g-{group}-{arrival}", [1], PARAMS)
            request.arrival = arrival
            self.waiting.add(request)
            self.twin.arrive(request)

    @rule(seats=st.integers(0, 6), held=st.sets(st.integers(0, 12)))
    def admit(self, seats: int, held: set[int]) -> None:
        by_hooks = {each.request_id for each in self.twin.waiting if each.arrival % 13 in held}
        admitted: list[Request] = []
        for request in self.waiting.in_turn():
            if len(admitted) == seats:
                break
            if request.request_id not in by_hooks:
                self.waiting.remove(request)
                request.status = RequestStatus.RUNNING
                self.running.add(request)
                admitted.append(request)
        assert admitted == self.twin.admit(by_hooks, seats)

    @precondition(lambda self: self.twin.running)
    @rule()
    def preempt(self) -> None:
        victim = self.running.pop()
        victim.status = RequestStatus.PREEMPTED
        self.waiting.add(victim)
        assert victim is self.twin.preempt()

    @precondition(lambda self: self.twin.running or self.twin.waiting)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.twin.waiting + self.twin.running))
        (self.running if request.status == RequestStatus.RUNNING else self.waiting).remove(request)
        self.twin.remove(request)

    @rule()
    def look(self) -> None:
        assert list(self.running) == self.twin.rounds() and len(self.running) == len(self.twin.running)
        in_turn = [r for name in self.twin.circle for r in self.twin.of(self.twin.waiting, name)]
        assert list(self.waiting.in_turn()) == in_turn and len(self.waiting) == len(in_turn)
        assert sorted(r.arrival for r in self.waiting) == sorted(r.arrival for r in in_turn)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(stateful_step_count=30)


CROWD = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12)  # (key, HTTP request)


def of_keys(crowd: list[tuple[int, int]]) -> list[Request]:
    requests = [make_request(f"0_cmpl-{key}{group}-{number}", [1], PARAMS) for number, (key, group) in enumerate(crowd)]
    for arrival, (request, (key, _)) in enumerate(zip(requests, crowd, strict=True)):
        request.arrival, request.tenant = arrival, key
    return requests


def queue_of(requests: list[Request]) -> FairQueue:
    queue = FairQueue()
    for request in requests:
        queue.add(request)
    return queue


def alternating(requests: list[Request], order: Callable[[FairQueue], list[Request]]) -> list[Request]:
    """What each key's requests would do alone, one of each key in turn. The first to arrive is the first key."""
    keys = dict.fromkeys(request.tenant for request in requests)
    alone = [order(queue_of([each for each in requests if each.tenant == key])) for key in keys]
    return [request for turn in zip_longest(*alone) for request in turn if request is not None]


def admissions(queue: FairQueue, passed: Collection[int] = ()) -> list[Request]:
    """Who is admitted if these arrivals are passed over."""
    found = []
    for request in queue.in_turn():
        if request.arrival not in passed:
            queue.remove(request)
            found.append(request)
    return found


@given(CROWD)
def test_keys_take_turns_whatever_else_they_send(crowd: list[tuple[int, int]]) -> None:
    """In admission and in the rounds of a step; and who goes first when blocks run out has got nothing in this step."""
    requests = of_keys(crowd)
    assert list(queue_of(requests)) == alternating(requests, list)
    assert admissions(queue_of(requests)) == alternating(requests, admissions)
    running = queue_of(requests)
    while running:
        last = list(running)[-1]
        assert running.pop() is last


@given(CROWD, st.sets(st.integers(0, 11)))
def test_who_is_passed_over_costs_its_key_no_turn(crowd: list[tuple[int, int]], passed: set[int]) -> None:
    requests = of_keys(crowd)
    queue = queue_of(requests)
    assert admissions(queue, passed) == alternating(requests, lambda own: admissions(own, passed))
    assert sorted(each.arrival for each in queue) == [each.arrival for each in requests if each.arrival in passed]


def drive(scheduler: Scheduler, names: list[str], steps: int = 1000) -> list[tuple[object, ...]]:
    """Queue all at once, run, and return every decision."""
    runner = ToyRunner(scheduler)
    for number, name in enumerate(names):
        params = SamplingParams(max_tokens=1 + 7 * number % 23, ignore_eos=True)
        scheduler.add_request(make_request(name, [number % 5] * (1 + 3 * number % 11), params))
    decisions: list[tuple[object, ...]] = []
    while scheduler.has_unfinished_requests and steps > 0:
        output, steps = scheduler.schedule(), steps - 1
        scheduler.update_from_output(output, runner.execute(output))
        started = [(new.request_id, list(new.block_ids), new.num_computed_tokens) for new in output.scheduled_new_reqs]
        given, blocks = list(output.num_scheduled_tokens.items()), dict(output.new_block_ids)
        decisions.append((given, blocks, started, list(output.preempted_req_ids)))
    return decisions


@given(
    st.integers(1, 25), st.integers(1, 6), st.sampled_from([8, 30]), st.integers(11, 25), st.booleans(), st.booleans()
)  # fmt: skip
def test_with_one_http_request_every_decision_is_that_of_fcfs(
    prompts: int, seats: int, budget: int, blocks: int, caching: bool, singles: bool
) -> None:
    def decisions(policy: str, names: list[str]) -> list[tuple[object, ...]]:
        return drive(make_scheduler(seats, budget, blocks, caching=caching, scheduling_policy=policy), names)

    names = [f"cmpl-{i}-0" if singles else f"cmpl-one-{i}" for i in range(prompts)]
    assert decisions("fair", names) == decisions("fcfs", names)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_http_requests_are_admitted_in_rounds(sizes: list[int], seats: int) -> None:
    groups = [[f"cmpl-{group}-{i}" for i in range(size)] for group, size in enumerate(sizes)]
    scheduler = make_scheduler(seats, 64, 200, scheduling_policy="fair")
    decisions = drive(scheduler, [name for group in groups for name in group])
    admitted = [new[0] for _, _, started, _ in decisions for new in started]  # type: ignore[attr-defined]
    assert admitted == [name for turn in zip_longest(*groups) for name in turn if name is not None]


def neighbour_beside_a_crowd(policy: str, num_blocks: int) -> tuple[int, list[str]]:
    """In which step a request gets its first seat that comes after 60 prompts of one HTTP request, and who was preempted."""
    scheduler = make_scheduler(6, 32, num_blocks, scheduling_policy=policy)
    names = [*(f"cmpl-crowd-{i}" for i in range(60)), "cmpl-small-0"]
    decisions = drive(scheduler, names)
    seated = next(i for i, (given, *_) in enumerate(decisions) if "cmpl-small-0" in dict(given))  # type: ignore[call-overload]
    return seated, [name for *_, preempted in decisions for name in preempted]  # type: ignore[attr-defined]


def test_a_neighbour_takes_the_second_seat_and_keeps_it() -> None:
    early, _ = neighbour_beside_a_crowd("fair", 100)
    late, _ = neighbour_beside_a_crowd("fcfs", 100)
    assert early == 0 and late > 50
    _, victims = neighbour_beside_a_crowd("fair", 18)  # there are too few blocks for six
    assert len(victims) > 10 and "cmpl-small-0" not in victims


def test_who_runs_keeps_running() -> None:
    scheduler = make_scheduler(2, 64, 100, scheduling_policy="fair")
    for name in ("cmpl-a-0", "cmpl-a-1", "cmpl-a-2"):
        scheduler.add_request(make_request(name, [1, 2], PARAMS))
    runner = ToyRunner(scheduler)
    output = scheduler.schedule()
    scheduler.update_from_output(output, runner.execute(output))
    scheduler.add_request(make_request("cmpl-b-0", [1, 2], PARAMS))
    for _ in range(3):
        output = scheduler.schedule()
        assert list(output.num_scheduled_tokens) == ["cmpl-a-0", "cmpl-a-1"] and not output.preempted_req_ids
        scheduler.update_from_output(output, runner.execute(output))
    assert [request.request_id for request in scheduler.waiting] == ["cmpl-a-2", "cmpl-b-0"]
    assert scheduler.waiting[0].request_id == "cmpl-a-2"


def seconds_for(num_requests: int, kind: type[FairQueue | RequestQueue], policy: str) -> float:
    """CPU time to queue as many prompts of one HTTP request as of others, admit them one by one, and end them backwards."""
    waiting, running = kind(policy), kind(policy)
    requests = [make_request(f"cmpl-{i if i % 2 else 'crowd'}-{i}", [1], PARAMS) for i in range(num_requests)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    start = time.thread_time()
    for request in requests:
        waiting.add(request)
    for request in waiting.in_turn():
        waiting.remove(request)
        running.add(request)
    for request in reversed(requests):
        running.remove(request)
    return time.thread_time() - start


@pytest.mark.parametrize(("kind", "policy"), [(FairQueue, "fair"), (RequestQueue, "fcfs"), (RequestQueue, "priority")])
def test_the_cost_of_a_queue_grows_with_its_length_and_no_faster(
    kind: type[FairQueue | RequestQueue], policy: str
) -> None:
    times = []
    for _ in range(3):  # a busy machine spoils one measurement, and not all
        small, large = (min(seconds_for(size, kind, policy) for _ in range(3)) for size in (1500, 6000))
        times.append(large / small)
        if times[-1] < 10:
            return
    raise AssertionError(f"quadratic would be 16 times: {times}")


def test_a_step_makes_no_object_for_each_http_request_that_waits() -> None:
    """Thousands of them, in each step, would also set off the garbage collector: a pause of tens of milliseconds."""
    queue = FairQueue()
    for i in range(4000):
        queue.add(make_request(f"cmpl-{i}-0", [1], PARAMS))
    tracemalloc.start()
    first = next(queue.in_turn())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first.request_id == "cmpl-0-0" and peak < 100_000, "a tuple each would be 250,000 bytes"


assert MAX_LEN == 40  # the numbers above count on it


@pytest.mark.long
def test_a_standstill_beside_4096_prompts_in_fair_turns() -> None:
    """With 20 logprobs each; a small neighbour is answered long before the crowd."""
    server = ServerProcess("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--scheduling-policy", "fair")
    try:
        url = server.wait_until_ready() + "/v1/completions"
        crowd = {"prompt": [f"To be, or not to be {i}" for i in range(4096)], "max_tokens": 4, "logprobs": 20}
        with Standstill(server.url) as standstill, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, url, json=crowd, timeout=PATIENCE)
            while not asked.done():
                small = httpx.post(url, json={"prompt": "ROMEO:", "max_tokens": 4}, timeout=PATIENCE)
                assert small.status_code == 200
            assert len(asked.result().json()["choices"]) == 4096
        assert standstill.seconds < LONGEST
    finally:
        server.close()
