"""Grammars of many keys: they take turns, what is refused is remembered, and no step waits longer than its budget."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE, wait_until
from toy_engine import ANY_JSON, STEM, ToyEngine, record

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import SchedulerConfig, VllmConfig
from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.structured_output import manager as rooms, step_threads
from stage03_engine.core.features.structured_output.backend_guidance import GrammarState, Guidance, Matcher
from stage03_engine.core.features.structured_output.grammar_checker import GrammarChecker, LostError
from stage03_engine.core.features.structured_output.lark import to_lark
from stage03_engine.core.features.structured_output.manager import StructuredOutputManager
from stage03_engine.core.features.structured_output.scheduler_hook import GrammarSchedulerHook
from stage03_engine.core.features.structured_output.step_threads import Job, StepThreads
from stage03_engine.core.features.turns.turns import Asker, Turns
from stage03_engine.grammar.vocabulary import Vocabulary
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreOutput
from stage03_engine.params.structured_outputs import StructuredOutputsParams as Wanted
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 50_000_000, "max_model_len": 256}
A, B = 0, 1
BOMBS = [Wanted(json={"type": "integer", "multipleOf": 323456789 + 2 * i}) for i in range(4)]
IMPOSSIBLE = Wanted(grammar="root ::= nope")


# Turns

asked = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), st.sampled_from("xyz")), max_size=40)


@given(asked, st.lists(st.booleans(), max_size=80))
def test_between_two_turns_of_a_key_each_other_has_one(askers: list[tuple[int | None, str]], moves: list[bool]) -> None:
    """`moves`: add the next, or take one. Within a key the same holds of HTTP requests, and within those the first comes first."""
    turns, coming, taken = Turns[int](), iter(enumerate(askers)), 0
    queued: dict[int, Asker] = {}
    # a key, or an HTTP request -> whose turn it was since its own
    since: dict[object, list[object]] = defaultdict(list)
    for add in [*moves, *[True] * len(askers), *[False] * len(askers)]:
        if add:
            for number, who in coming:
                queued[number] = Asker(*who)
                for name in (queued[number].tenant, queued[number]):
                    if sum(name in (other, other.tenant) for other in queued.values()) == 1:
                        since[name] = []  # it waits from now on
                turns.add(queued[number], number)
                break
            continue
        assert bool(turns) == bool(queued)
        if not queued:
            continue
        number = turns.pop()
        who = queued.pop(number)
        assert not any(other < number for other, asker in queued.items() if asker == who), "not in the order of arrival"
        for other in queued.values():
            if other.tenant != who.tenant:
                since[other.tenant].append((who.tenant, taken))
            elif other != who:
                since[other].append((who, taken))
        taken += 1
        since[who.tenant], since[who] = [], []
        for turns_of_others in since.values():
            names = [name for name, _ in set(turns_of_others)]
            assert len(names) == len(set(names)), "another had two turns meanwhile"


# The budget of a step


@pytest.fixture
def waiting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs here wait where a grammar would compute."""
    monkeypatch.setattr(step_threads, "clock_of_this_thread", lambda: time.CLOCK_MONOTONIC)


def test_a_busy_machine_makes_no_grammar_too_complex() -> None:
    """Only the time counts in which its thread computes."""
    never, go_on, threads = threading.Event(), threading.Event(), StepThreads(0.02)

    def waits() -> GrammarState:
        never.wait(0.1)
        return GrammarState(b"x")

    def computes() -> GrammarState:
        while not go_on.is_set():
            pass
        return GrammarState(b"x")

    jobs, done = [Job(waits), Job(computes)], dict[Job, GrammarState | None]()
    for job in jobs:
        threads.add(Asker(None, "x"), job)
    while len(done) < 2:
        threads.run(0.005)
        done |= {job: job.state for job in threads.take_done()}
    assert done == {jobs[0]: GrammarState(b"x"), jobs[1]: None}
    go_on.set()
    threads.shutdown()


def test_threads_begin_nothing_when_the_budget_is_over() -> None:
    go_on, began = threading.Event(), list[int]()

    def work(number: int) -> GrammarState:
        began.append(number)
        go_on.wait(60)
        return GrammarState(b"x")

    threads = StepThreads(60.0)
    jobs = [Job(lambda i=i: work(i)) for i in range(100)]  # type: ignore[misc]
    for job in jobs:
        threads.add(Asker(None, "x"), job)
    while not began:
        threads.run(0.1)
    assert 1 <= len(began) <= threads._num_threads <= 8
    go_on.set()
    with threads.news:
        threads.news.wait_for(lambda: not threads._running, PATIENCE)
    done = len(threads.take_done())
    assert done == len(began) < 100, "the jobs that had begun, and no other"
    threads.run(60.0)
    assert sorted(began) == list(range(100)) and began[:done] == sorted(began[:done]) and not threads.busy
    assert done + len(threads.take_done()) == 100
    threads.shutdown()


@pytest.mark.usefixtures("waiting_counts")
def test_the_clock_of_a_job_runs_when_a_thread_begins_with_it() -> None:
    """And only the thread of the one that takes too long is given up."""
    go_on = threading.Event()
    threads = StepThreads(0.01)
    slow = [Job(lambda: go_on.wait(60) and GrammarState(b"")) for _ in range(threads._most_threads)]  # type: ignore
    waits, panics = Job(lambda: GrammarState(b"x")), Job(lambda: 1 / 0)  # type: ignore
    for job in slow:
        threads.add(Asker(None, "x"), job)
    done: list[Job] = []
    while len(done) < len(slow):
        threads.run(0.005)
        done += threads.take_done()
    assert set(done) == set(slow) and {job.state for job in done} == {None}
    for job in (waits, panics):
        threads.add(Asker(None, "x"), job)
    threads.run(60.0)
    assert set(threads.take_done()) == {waits, panics} and waits.state == GrammarState(b"x")
    assert panics.state is not None and "failed" in panics.state.failed
    go_on.set()
    threads.shutdown()


def test_who_is_preempted_while_it_sits_out_gets_its_token_first(tmp_path: Path) -> None:
    def storm() -> None:
        engine = ToyEngine(3, num_blocks=26, max_num_batched_tokens=96)
        engine.grammars.late_rate, engine.grammars.end_rate = 0.7, 0.0
        for i in range(20):
            engine.add(f"r{i}", [*STEM[:5], i], max_tokens=20, ignore_eos=True, structured_outputs=ANY_JSON)
        while not engine.is_idle:
            engine.step()
            check_invariants(engine.scheduler)

    [result] = replay(record(tmp_path, storm))
    events = read_run(tmp_path).events
    assert result.difference is None and sum(e.args["num_tokens"] for e in events if e.name == "sched.token") == 20 * 20
    late, preempted = set[str | None](), 0
    for event in events:
        preempted += event.name == "sched.preempt" and event.req in late
        (late.add if event.name == "grammar.missed" else late.discard if event.name == "sched.token" else id)(event.req)
    assert preempted > 5


MIXED = [
    Wanted(regex="[a-z ]{200}"), None, Wanted(json={"type": "string", "minLength": 100}), Wanted(regex="([A-Z]+ ?){90}"),
    Wanted(choice=["one", "two"]),
]  # fmt: skip


def tokens_of(folder: Path, **limits: Any) -> list[tuple[list[int], str | None]]:
    """What ten requests write beside each other, preempted now and then."""
    tiny = {"num_gpu_blocks_override": 17, "block_size": 8, "max_model_len": 128, "max_num_seqs": 6}
    each = [
        SamplingParams(max_tokens=50, seed=i, structured_outputs=wanted, logprobs=1, temperature=0.9 * (i % 3 > 0))
        for i, wanted in enumerate(MIXED * 2)
    ]
    with LLM("gpt2-tiny", trace=str(folder), **tiny, **limits) as llm:
        made = [o.outputs[0] for o in llm.generate(["ROMEO: what is it"] * len(each), each)]
    assert all(len(m.logprobs or ()) == len(m.token_ids) for m in made)
    return [(m.token_ids, m.finish_reason) for m in made]


@pytest.mark.slow(keep="True")
@pytest.mark.parametrize("ahead", [False, True])
def test_who_sits_out_writes_the_same_and_is_replayed(ahead: bool, tmp_path: Path) -> None:
    settings = {"async_scheduling": ahead}
    usual = tokens_of(tmp_path / "usual", **settings)
    assert tokens_of(tmp_path / "hasty", **settings, grammar_budget_seconds=0.0001) == usual
    run = read_run(tmp_path / "hasty")
    assert run.named("grammar.missed") and run.named("sched.preempt")
    for folder in ("usual", "hasty"):
        assert [result.difference for result in replay(tmp_path / folder)] == [None]


# Grammars whose items are few, and the ways to them many: no limit of llguidance stops a step of a second or more

AMBIGUOUS = {
    "two of itself": 'root ::= root root | "a"',
    "three of itself": 'root ::= root root root | root root | "a" | "b" | "ab"',
    "nested repetition": 'root ::= ("a"{0,300}){0,300}',
    "mirrored": 'root ::= "a" root "a" | "a" root | root "a" | "a"',
    "empty parts": 'root ::= part part part part\npart ::= part part | "" | "a"',
}
VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)] + [b"a" * length for length in range(2, 21)], None)
LONG_TOKENS = [274] * 14


def longest_standstill(work: Callable[[], object]) -> tuple[float, float]:
    """(how long it took in a thread, for how long the interpreter could do nothing else meanwhile), both in seconds."""
    thread, start, longest = threading.Thread(target=work), time.perf_counter(), 0.0
    thread.start()
    while thread.is_alive():
        before = time.perf_counter()
        thread.join(0.001)
        longest = max(longest, time.perf_counter() - before)
    return time.perf_counter() - start, longest


@pytest.mark.slow(keep="two of itself")
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_the_interpreter_goes_on_while_a_grammar_moves_on(name: str) -> None:
    """Also while another request with the same grammar does: they share a lexer and its lock."""
    backend = Guidance(VOCABULARY, len(VOCABULARY.tokens))
    compiled = backend.compile(to_lark("grammar", AMBIGUOUS[name]))
    one, other, third = (Matcher(backend, compiled, False) for _ in range(3))
    works = [one.start, other.start, partial(accept_each, third, LONG_TOKENS)]
    took, stood = longest_standstill(partial(run_together, works))
    assert stood < 0.15 + took / 20, f"the interpreter stood for {stood:.2f} of {took:.2f} s"


def accept_each(matcher: Matcher, token_ids: list[int]) -> None:
    """Until the grammar fails."""
    for token_id in token_ids:
        if matcher.accept([token_id]).failed:
            break


def run_together(works: list[Callable[[], object]]) -> None:
    """Each in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("waiting_counts")
def test_one_key_leaves_threads_to_the_others_also_while_it_waits_for_lost_ones() -> None:
    go_on, threads = threading.Event(), StepThreads(0.05)
    slow = [Job(lambda: go_on.wait(60) and GrammarState(b"")) for _ in range(40)]  # type: ignore
    for job in slow:
        threads.add(Asker(A, "x"), job)
    begun = quick_ones = 0
    while begun < threads._most_threads // 2 or quick_ones < 20:
        quick, quick_ones = Job(lambda: GrammarState(b"x")), quick_ones + 1
        threads.add(Asker(B, "y"), quick)
        while quick.state is None:
            threads.run(0.005)
            threads.take_done()
        begun = sum(job.clock is not None for job in slow)
    assert begun == threads._most_threads // 2, "each was given up, and its thread still counts"
    go_on.set()
    done = set[Job]()
    while len(done) < len(slow) - begun:
        threads.run(PATIENCE)
        done |= set(threads.take_done())
    assert all(job.state is not None for job in done)
    threads.shutdown()


@pytest.mark.usefixtures("waiting_counts")
def test_without_keys_threads_that_are_given_up_are_bounded() -> None:
    go_on, threads = threading.Event(), StepThreads(0.001)
    slow = [Job(lambda: go_on.wait(60) and GrammarState(b"")) for _ in range(100)]  # type: ignore
    for job in slow:
        threads.add(Asker(None, "x"), job)

    def begun() -> int:
        threads.run(0.002)
        threads.take_done()
        return sum(job.clock is not None for job in slow)

    wait_until(lambda: begun() >= 2 * threads._most_threads, "too few began")
    assert {begun() for _ in range(200)} == {2 * threads._most_threads}
    go_on.set()
    threads.shutdown()


def test_a_step_waits_once_for_each_job_and_not_again() -> None:
    go_on, threads = threading.Event(), StepThreads(60.0)
    job = Job(lambda: go_on.wait(60) and GrammarState(b""))  # type: ignore
    threads.add(Asker(A, "x"), job)
    threads.run(0.05)
    start = time.monotonic()
    threads.run(PATIENCE)  # for nothing
    quick = Job(lambda: GrammarState(b"x"))
    threads.add(Asker(B, "y"), quick)
    threads.run(PATIENCE)  # for the other
    assert time.monotonic() - start < PATIENCE / 2 and quick.state is not None and job.state is None and job.missed
    go_on.set()
    threads.shutdown()


@pytest.mark.usefixtures("waiting_counts")
def test_steps_wait_for_a_key_no_longer_than_they_take_without_it() -> None:
    """Each step brings it another job that takes long. What steps wait for others is not its affair."""
    go_on, threads, step, others = threading.Event(), StepThreads(0.001), 0.4, 0.0
    threads._most_threads = 64  # never the reason
    start = time.monotonic()
    for _ in range(20):
        threads.add(Asker(A, "x"), Job(lambda: go_on.wait(60) and GrammarState(b"")))  # type: ignore
        threads.run(step)
        threads.take_done()  # it is given up
        began = time.monotonic()
        quick = Job(lambda: GrammarState(b"x"))
        threads.add(Asker(B, "y"), quick)
        while quick.state is None:
            threads.run(step)
        others += time.monotonic() - began
    waited = time.monotonic() - start - others
    assert step / 2 < waited < 2 * step + others, "once the whole step, and then no longer than all else took"
    go_on.set()
    threads.shutdown()


# Compiling


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    config = EngineArgs.from_kwargs(
        model="gpt2-tiny", grammar_compile_seconds=1.0, max_waiting_grammars=4, grammar_cache_size=2, **SMALL
    )
    manager = StructuredOutputManager(config)
    yield manager
    manager.shutdown()


def begin(manager: StructuredOutputManager, name: str, wanted: Wanted, tenant: int | None, salt: str = "") -> None:
    manager.grammar_init(name, SamplingParams(structured_outputs=wanted), salt or f"salt of {tenant}", tenant)


def is_ready(manager: StructuredOutputManager, name: str) -> bool:
    """Are its first tokens known?"""
    return manager.grammar_bitmask([name]) is not None


def outcome(manager: StructuredOutputManager, name: str, others: list[EngineCoreOutput] | None = None) -> str:
    """How a request begins: "" or an error. `others` collects what ends before."""
    end = time.monotonic() + PATIENCE
    while not is_ready(manager, name):
        assert time.monotonic() < end, f"{name} waits for ever"
        for output in manager.poll():
            if output.request_id == name:
                return output.error or ""
            if others is not None:
                others.append(output)
        if not is_ready(manager, name):
            manager.wait(1.0)
    return ""


def test_a_small_grammar_waits_for_no_large_ones_of_another_key(manager: StructuredOutputManager) -> None:
    for i, bomb in enumerate(BOMBS):
        begin(manager, f"a{i}", bomb, A)
    ended: list[EngineCoreOutput] = []
    for i in range(3):
        begin(manager, f"b{i}", Wanted(regex=f"b{{{i + 1}}}"), B)
        assert outcome(manager, f"b{i}", ended) == "" and ended == []
        manager.free(f"b{i}")
    assert "too complex" in outcome(manager, "a0")


def test_one_key_fills_no_place_of_another(manager: StructuredOutputManager) -> None:
    """Two places each; what waits for one goes on when a request ends, and another key's wish for it counts."""
    for i in range(3):
        begin(manager, f"a{i}", Wanted(regex=f"a{{{i + 1}}}"), A, "shared")
    assert outcome(manager, "a0") == outcome(manager, "a1") == "" and not is_ready(manager, "a2")
    begin(manager, "b", Wanted(regex="b"), B)
    begin(manager, "b2", Wanted(regex="a{3}"), B, "shared")
    assert outcome(manager, "b") == outcome(manager, "b2") == outcome(manager, "a2") == ""
    begin(manager, "a3", Wanted(regex="a{4}"), A)
    manager.free("a1")
    assert outcome(manager, "a3") == ""


def test_what_is_refused_is_remembered_for_its_key_and_salt(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    add = manager._compilers.add
    monkeypatch.setattr(manager._compilers, "add", lambda who, new: (compiled.append(new.text), add(who, new)))

    def times(name: str, wanted: Wanted, tenant: int, salt: str = "") -> int:
        begin(manager, name, wanted, tenant, salt)
        assert outcome(manager, name)
        manager.free(name)
        compiled_now = len(compiled)
        compiled.clear()
        return compiled_now

    assert times("1", IMPOSSIBLE, A) == 1
    assert times("2", IMPOSSIBLE, A) == 0
    assert times("3", IMPOSSIBLE, B) == 1, "another key notices nothing"
    assert times("4", IMPOSSIBLE, A, "another") == 1
    monkeypatch.setattr(rooms, "MAX_REMEMBERED", 2)
    assert times("5", Wanted(grammar="root ::= nope2"), A) == 1 and times("6", Wanted(grammar="root ::= nope2"), A) == 0
    assert times("7", IMPOSSIBLE, A) == 1, "the oldest was forgotten"
    with monkeypatch.context() as patch:
        patch.setattr(GrammarChecker, "check", lambda self, *_: (_ for _ in ()).throw(LostError("was killed")))
        assert times("8", Wanted(regex="x"), A) == 1 and times("9", Wanted(regex="x"), A) == 1
    begin(manager, "10", Wanted(regex="x"), A)
    assert outcome(manager, "10") == "", "what was lost is compiled again"


def test_a_key_has_so_many_grammars_waiting_and_not_more(manager: StructuredOutputManager) -> None:
    """Those that end, and those whose requests leave, make room; requests for the same grammar count once."""
    for i, bomb in enumerate(BOMBS):
        for copy in range(3):
            begin(manager, f"cmpl-{i}-{copy}", bomb, A)
    begin(manager, "more", Wanted(regex="a"), A)
    begin(manager, "same", BOMBS[0], A)
    refused = manager.poll()
    assert [output.request_id for output in refused] == ["more"] and refused[0].busy
    manager.free("more")
    begin(manager, "other", Wanted(regex="a"), B)
    assert outcome(manager, "other") == ""
    for copy in range(3):
        manager.free(f"cmpl-3-{copy}")
    begin(manager, "now", Wanted(regex="a"), A)
    assert manager.poll() == []
    for name in list(manager._requests):
        manager.free(name)
    begin(manager, "last", Wanted(regex="c"), A)
    assert outcome(manager, "last") == "" and manager.num_not_ready == 0
    manager.free("last")
    while any(tenant.num_waiting for tenant in manager._tenants.values()):
        manager.wait(1.0)
        manager.poll()
    assert not manager._next_jobs and not manager._first_jobs and not manager._requests


class OneByOne(dict):
    """May be asked for one request, never looked through."""

    def __iter__(self) -> Any:
        raise AssertionError("a step looked at every request")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_a_step_costs_what_has_changed_and_not_what_waits(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager._requests = OneByOne()
    begin(manager, "runs", Wanted(regex="[ab]+"), A)
    assert outcome(manager, "runs") == ""
    for i in range(2000):
        begin(manager, f"cmpl-{i}-0", BOMBS[0], A)
    grammar = next(iter(reversed(manager._grammars.values())))
    assert len(grammar.users) == 2000 and manager.num_not_ready == 2000
    monkeypatch.setattr(grammar, "users", OneByOne(grammar.users))
    mask = (manager.grammar_bitmask(["runs"]) or {})["runs"]
    token = next(i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1)
    assert manager.poll() == []
    known = manager.accept_tokens({"runs": [token]}).known
    while not known:
        known = manager.accept_tokens({}).known
    manager.wait(0.0)


def test_requests_with_a_grammar_leave_seats_to_other_keys() -> None:
    """One that sits steps out keeps its seat: without a bound, those of one key would hold them all."""
    config = VllmConfig(scheduler_config=SchedulerConfig(max_num_seqs=4))
    requests = {f"r{number}": waiting(f"r{number}", tenant=number % 2) for number in range(10)}
    requests |= {f"n{number}": waiting(f"n{number}", tenant=None) for number in range(10)}
    scheduler = SimpleNamespace(step=1, requests=requests, held=dict(requests), stats=SimpleNamespace())
    scheduler.finish_requests = lambda ids, reason: None
    hook = GrammarSchedulerHook(scheduler, config, AllReady(requests))  # type: ignore[arg-type]
    hook.poll()
    assert list(hook.released()) == [*list(requests)[:4], *list(requests)[10:]]
    hook.finished(requests["r6"])
    hook.finished(requests["r0"])
    assert list(hook.released()) == ["r4"] and not list(hook.released())
    for request in requests.values():
        hook.finished(request)
    assert not any(hook._seated.values()) and not any(hook._seatless.values()) and not list(hook.released())


class AllReady:
    """Every grammar is compiled."""

    num_not_ready = num_known = 0

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def poll(self) -> list[EngineCoreOutput]:
        return []

    def take_ready(self) -> list[str]:
        ready, self.names = self.names, []
        return ready

    def free(self, request_id: str) -> None:
        pass


def waiting(name: str, tenant: int | None) -> Any:
    params = SimpleNamespace(structured_outputs=True)
    return SimpleNamespace(request_id=name, tenant=tenant, sampling_params=params)
