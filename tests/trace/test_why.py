"""`why`: what it says of a step is what the scheduler decided there, for every step of every request, with the right numbers."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from toy_engine import ANY_JSON, STEM, ToyEngine, random_life, record

from stagetrace import Event, read_run
from stagetrace.__main__ import main
from stagetrace.check.reason_words import CODE
from stagetrace.check.reasons import StepReasons, explain, explain_all, find_request
from stagetrace.errors import TraceError

ROOT = Path(__file__).parents[2]


def told(directory: Path, request_id: str) -> dict[int, StepReasons]:
    steps: dict[int, StepReasons] = {}
    for step in explain(directory, request_id):
        steps.setdefault(step.step, StepReasons(step.step, step.before)).reasons.extend(step.reasons)
    return steps


def rules_by_event(events: list[Event], request_id: str, step: int) -> set[str]:
    """The naive meaning: which rules the events of one step name for a request."""
    begin = next(i for i, e in enumerate(events) if e.name == "engine.step" and e.ph == "B" and e.step == step)
    rules = set()
    for event in events[begin:]:
        if event.name == "engine.step" and event.ph == "E":
            break
        args = event.args
        if event.name == "sched.held_back":
            if request_id == args["first"]:
                rules.add(args["rule"])
            rules |= {"order"} if request_id in args["behind"] else {"grammar"} if request_id in args["held"] else set()
        elif event.req == request_id:
            named = {
                "sched.admit": "admit", "sched.resume": "resume", "sched.scheduled": "chunk", "sched.preempt": "preempt",
                "sched.prefix_hit": "prefix", "sched.turn": "turn", "spec.scheduled": "drafts", "spec.verified": "verify", "grammar.ready": "grammar",
                "grammar.missed": "grammar late",
            }  # fmt: skip
            rules |= {named[event.name]} if event.name in named else set()
            rules |= {"end " + args["by"]} if event.name == "sched.finished" else set()
    return rules


@given(
    st.integers(0, 10**6), st.sampled_from(["fcfs", "priority", "fair"]), st.sampled_from([0, 6]), st.sampled_from([0, 8]), st.booleans()
)  # fmt: skip
def test_every_step_of_every_request_has_its_reasons(
    seed: int, policy: str, threshold: int, swap: int, chunked: bool
) -> None:
    def life() -> None:
        engine = ToyEngine(
            seed, num_blocks=26, max_num_seqs=4, max_num_batched_tokens=20 if chunked else 96, num_drafts=2, swap_blocks=swap,
            scheduling_policy=policy, enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold if chunked else 0,
        )  # fmt: skip
        random_life(engine, 10)

    with tempfile.TemporaryDirectory() as folder:
        events = read_run(record(Path(folder), life)).events
        steps = [e.step for e in events if e.name == "engine.step" and e.ph == "B" and e.step is not None]
        for request_id in [e.req for e in events if e.name == "sched.queued" and e.req is not None]:
            mine = told(Path(folder), request_id)
            first = next(i for i, e in enumerate(events) if e.name == "sched.queued" and e.req == request_id)
            last = next(i for i, e in enumerate(events) if e.name == "sched.finished" and e.req == request_id)
            alive = {e.step for e in events[first:last] if e.name == "engine.step" and e.ph == "B"}
            for step in steps:
                rules = {reason.rule for reason in mine[step].reasons} - {"end outside"} if step in mine else set()
                assert rules - {"budget of running", "last token"} == rules_by_event(events, request_id, step)
                assert bool(rules) == (step in alive), "every step in which a request is in the engine has a reason"


def one(
    directory: Path, life: Callable[[ToyEngine], None], request_id: str, step: int, **settings_of_engine: Any
) -> str:
    """The sentences about a request in a step."""

    def live() -> None:
        engine = ToyEngine(0, **settings_of_engine)
        life(engine)
        engine.run()

    record(directory, live)
    return " ".join(reason.text for reason in told(directory, request_id)[step].reasons)


def many(engine: ToyEngine, count: int = 4, length: int = 12, max_tokens: int = 12) -> None:
    for i in range(count):
        engine.add(f"r{i}", [100 + i] * length, max_tokens=max_tokens, ignore_eos=True)


def test_waiting_for_a_seat_and_behind_somebody(tmp_path: Path) -> None:
    text = one(tmp_path, many, "r2", 1, max_num_seqs=2)
    assert text == "It waits, first in the queue: 2 requests run already, and max_num_seqs is 2."
    text = " ".join(reason.text for reason in told(tmp_path, "r3")[1].reasons)
    assert text.startswith("It waits, number 2 in the queue, behind r2; nobody overtakes. Why r2 waits: 2 requests")


def test_waiting_for_budget_and_the_chunk_that_was_left(tmp_path: Path) -> None:
    assert "no token of the budget (20) was left" in one(tmp_path, many, "r2", 1, max_num_batched_tokens=20)
    text = " ".join(reason.text for reason in told(tmp_path, "r1")[1].reasons)
    assert (
        "It got 8 of 12 missing tokens: 8 of the budget of 20 were left. With them 8 of 12 tokens are computed." in text
    )
    assert "They take 2 blocks of 4 tokens: it had 0 of them, and took [4, 5] from the free ones." in text


def test_the_threshold_of_long_prompts(tmp_path: Path) -> None:
    text = one(tmp_path, many, "r0", 1, long_prefill_token_threshold=5)
    assert "It got 5 of 12 missing tokens: long_prefill_token_threshold is 5, and others are there" in text


def test_no_chunking(tmp_path: Path) -> None:
    text = one(tmp_path, many, "r2", 1, enable_chunked_prefill=False, max_num_batched_tokens=30)
    assert "12 tokens must be computed at once (chunked prefill is off), and 6 of the budget were left." in text


def storm(engine: ToyEngine) -> None:
    many(engine, 3, 30, 30)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_preemption_says_who_needed_what_and_why_this_victim(policy: str, tmp_path: Path) -> None:
    record(tmp_path, lambda: _storm(policy))
    event = read_run(tmp_path).named("sched.preempt")[0]
    assert event.req is not None and event.step is not None
    text = told(tmp_path, event.req)[event.step].reasons[0].text
    assert text.startswith(
        f"It was preempted: {event.args['needed_by']} needed blocks, and 0 were free. Of 3 running requests"
    )
    assert ("its priority is 0" in text) == (policy == "priority") and ("arrived last goes first" in text) == (
        policy == "fcfs"
    )
    assert f"It gave {event.args['freed_blocks']} blocks back; its {event.args['num_computed']} computed tokens" in text
    waiting = told(tmp_path, event.req)[event.step + 1].reasons[0].text
    assert "blocks of 4 tokens (fewer where the prefix cache has them); free:" in waiting


def _storm(policy: str) -> None:
    engine = ToyEngine(0, num_blocks=26, scheduling_policy=policy)
    storm(engine)
    engine.run()


def test_fair_turns_say_whose_they_are(tmp_path: Path) -> None:
    def life() -> None:
        engine = ToyEngine(0, max_num_seqs=2, scheduling_policy="fair")
        for name in ("cmpl-crowd-0", "cmpl-crowd-1", "cmpl-crowd-2", "cmpl-small-0"):
            engine.add(name, [1, 2, 3], max_tokens=2, ignore_eos=True)
        engine.run()

    record(tmp_path, life)
    text = {
        name: " ".join(r.text for r in told(tmp_path, name)[1].reasons) for name in ("cmpl-crowd-0", "cmpl-crowd-2")
    }
    assert (
        "It was the turn of its HTTP request, cmpl-crowd: 1 other HTTP request waits, and 2 more of its own wait until"
        in text["cmpl-crowd-0"]
    )
    assert (
        "number 2 in the queue, behind cmpl-crowd-1; HTTP requests take turns, and it is now that of cmpl-crowd."
        in (text["cmpl-crowd-2"])
    )
    small = told(tmp_path, "cmpl-small-0")[1].reasons
    assert [r.rule for r in small] == ["admit", "chunk", "turn"] and "and none of its own waits." in small[-1].text
    assert small[-1].places.startswith("stage03_engine/core/features/fair_queue/fair_queue.py FairQueue.in_turn")


def test_a_prefix_hit_names_who_had_cached_it(tmp_path: Path) -> None:
    def life() -> None:
        engine = ToyEngine(0)
        for i in range(2):
            engine.add(f"r{i}", [*STEM[:9], i], max_tokens=2, ignore_eos=True)
            engine.run()

    record(tmp_path, life)
    text = " ".join(reason.text for reason in told(tmp_path, "r1")[3].reasons)
    assert (
        "The first 8 tokens of it (2 full blocks) were found in the prefix cache: [1, 2], cached by r0 in step 1."
        in text
    )
    assert "It got 2 tokens: all that it was missing" in text and "it had 2 of them, found in the prefix cache" in text


def test_grammars_ends_and_aborts(tmp_path: Path) -> None:
    def life() -> None:
        engine = ToyEngine(9)
        engine.add("g", [1, 2, 3], max_tokens=4, structured_outputs=ANY_JSON, ignore_eos=True)
        engine.add("a", [1, 2, 3], max_tokens=40, ignore_eos=True)
        engine.add("l", [1, 2, 3], max_tokens=4, ignore_eos=True)
        for _ in range(5):
            engine.step()
        engine.scheduler.finish_requests(["a"])
        engine.run()

    record(tmp_path, life)
    assert any("its grammar" in reason.text for step in told(tmp_path, "g").values() for reason in step.reasons)
    assert (
        told(tmp_path, "l")[4].reasons[-1].text
        == "It ended (length): it has its max_tokens = 4. It gave 2 blocks back."
    )
    assert "It ended (abort): between two steps" in told(tmp_path, "a")[5].reasons[-1].text


def test_ids_may_be_shortened_as_long_as_one_is_meant(tmp_path: Path) -> None:
    def life() -> None:
        engine = ToyEngine(0)
        for name in ("cmpl-a-0001-0", "cmpl-a-0002-0", "cmpl-b-0003-0", "b"):
            engine.add(name, [1, 2, 3], max_tokens=2)
        engine.run()

    record(tmp_path, life)
    assert find_request(tmp_path, "0002") == "cmpl-a-0002-0" and find_request(tmp_path, "b") == "b"
    with pytest.raises(
        TraceError, match=r"'cmpl-a' is part of 2 request ids: cmpl-a-0001-0, cmpl-a-0002-0; give more of it"
    ):
        find_request(tmp_path, "cmpl-a")
    with pytest.raises(TraceError, match=r"no request id contains 'zz'; there are cmpl-a-0001-0, "):
        find_request(tmp_path, "zz")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one(tmp_path, many, "r2", 1, max_num_seqs=2)
    assert main(["why", str(tmp_path), "--req", "r2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "r2:" and lines[1] == "  steps 1 to 12: waits: max_num_seqs"
    assert lines[2:] == [
        "  step 13: admitted, prefill of 12",
        "  steps 14 to 23: decode of 1",
        "  step 24: decode of 1, ended: length",
    ]
    assert main(["why", str(tmp_path), "--req", "r2", "--step", "5"]) == 0
    out = capsys.readouterr().out
    assert "before: running: r0 (15 of 16 tokens computed)" in out
    assert "rule: stage03_engine/core/scheduler.py Scheduler._schedule_waiting; in vLLM: vllm/v1/core/sched" in out
    assert main(["why", str(tmp_path), "--req", "r2", "--step", "99"]) == 0
    assert "It had ended already: it was there from step 1 to step 24." in capsys.readouterr().out
    for words in (["--req", "r2", "--step", "0"], ["--req", "r"], ["--req", "x"]):
        assert main(["why", str(tmp_path), *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_rules_stand_where_it_says_they_do() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for here, _ in CODE.values():
        file, _, name = here.partition(" ")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        assert set(name.split(".")) <= names, f"{file} has no {name}"


def test_every_rule_of_the_scheduler_has_its_words() -> None:
    """The rules that the scheduler names in its events, read from its source."""
    text = (ROOT / "stage03_engine/core/scheduler.py").read_text(encoding="utf-8")
    rules = set(re.findall(r'rule = "(\w+)"(?: if .+ else "(\w+)")?|_trace_held_back\("(\w+)"', text))
    assert {name for pair in rules for name in pair if name} <= CODE.keys() | {"grammar"}
    ends = {"eos", "stop_token", "length", "grammar", "outside"}
    assert {"end " + end for end in ends} <= CODE.keys()


@pytest.mark.parametrize(
    "name", ["mixed", "preemption", "prefix_hits", "speculative", "client_abort", "bug_starvation"]
)
def test_all_requests_at_once_have_the_reasons_of_each(name: str) -> None:
    """From events in memory: one state for all of them instead of one each."""
    events = read_run(ROOT / "trace" / "recorded" / name).events
    (engine,) = {event.pid for event in events if event.name == "scheduler.created"}
    found = explain_all(event for event in events if event.pid == engine)
    assert found
    for request_id, steps in found.items():
        one = [replace(step, engine=0, process="") for step in explain(ROOT / "trace" / "recorded" / name, request_id)]
        assert steps == one
