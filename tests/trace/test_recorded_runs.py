"""The recorded runs: what a reader of the project looks at first, so they must be true, and small."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from stagetrace import VOCABULARY, Event, Story, read_run, tell
from stagetrace.__main__ import main
from stagetrace.check.invariant_rules import well_formed
from stagetrace.check.invariants import Notes
from stagetrace.commands import COMMANDS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir())
BUGS = ["bug_leak", "bug_stall", "bug_starvation"]

EXPECTED: dict[int, list[str]] = {
    1: ["cli.main", "cli.env_setup", "cli.parser_created", "cli.parsed", "cli.dispatch"],
    2: ["serve.model_tag", "serve.decision"],
    3: ["server.socket_bound", "server.engine_config", "server.app_built", "server.state_ready", "server.listening"],
    4: ["async_llm.init", "client.created", "tokenizer.loaded", "input_processor.created", "output_processor.created",
        "stat_loggers.created", "output_handler.started"],
    5: ["engine.spawned", "engine.hello", "engine.init_sent", "executor.created", "weights.loaded", "kv_cache.profiled",
        "kv_cache.allocated", "scheduler.created", "engine.threads_started", "engine.ready", "engine.busy_loop"],
    6: ["http.request", "request.validated", "request.sampling_params"],
    7: ["request.tokenized", "generate.start", "request.registered", "zmq.request_sent", "zmq.request_received"],
    8: ["sched.queued", "engine.step begin", "sched.admit", "sched.scheduled", "sched.output", "executor.execute begin",
        "runner.prepared", "model.forward begin", "model.forward end", "model.logits", "sampler.sampled",
        "executor.execute end", "sched.token", "engine.step end"],
    9: ["zmq.outputs_sent", "zmq.outputs_received", "request.detokenized", "request.collected", "generate.yield",
        "sse.chunk", "request.finished"],
}  # fmt: skip
"""Phase -> what a reader expects to see of it, in this order, when one request is served."""


@cache
def events_of(name: str) -> list[Event]:
    return read_run(RECORDED / name).events


@cache
def story_of(name: str) -> Story:
    return tell(events_of(name))


def numbered(story: Story) -> dict[str, str]:
    """Request id -> the number that its client gave it."""
    return {request_id: request_id.split("-")[1] for request_id in story.requests}


def first_lines(lines: list[str]) -> dict[str, int]:
    """What a line is about -> where it stands first."""
    places: dict[str, int] = {}
    for place, line in enumerate(lines):
        match = re.match(r"\[TRACE\] \(\w+\.py\) (\S+( begin| end)?)( |$)", line)
        assert match is not None, line
        places.setdefault(match[1], place)
    return places


def test_the_lines_of_one_request_stand_in_the_order_of_the_nine_phases() -> None:
    events = events_of("one_request")
    place = first_lines([event.console_line() for event in events])
    for phase, names in EXPECTED.items():
        assert [place[name] for name in names] == sorted(place[name] for name in names), f"phase {phase}"
        assert all(VOCABULARY[name.split()[0]].phase == phase for name in names)
    begins = [min(place[name] for name in names) for names in EXPECTED.values()]
    assert begins == sorted(begins), "each phase begins after the one before it"
    way = [name for phase in (6, 7, 8, 9) for name in EXPECTED[phase]]
    assert [place[name] for name in way] == sorted(place[name] for name in way), "and from the request on one by one"


def test_every_expected_kind_of_event_is_in_the_recording() -> None:
    """A row that was added to the vocabulary, and that every request emits, is not there yet: `make recordings`."""
    recorded = {event.name for event in events_of("one_request")}
    assert {name for name, row in VOCABULARY.items() if row.main_path} <= recorded


@pytest.mark.parametrize("name", RUNS)
def test_a_run_reads_and_speaks_the_vocabulary(name: str) -> None:
    run = read_run(RECORDED / name)
    assert len(run.run_ids) == 1 and run.torn <= (name == "engine_death")
    notes = Notes()
    wrong = [event.name for event in run.events if not well_formed(event, notes)]
    assert not wrong, f"make recordings: {list(notes.findings.values())}"


@cache
def emitters() -> dict[str, set[str]]:
    """Event -> the files of the stages that emit it."""
    found: dict[str, set[str]] = {"run.start": {"open.py"}}
    for path in ROOT.glob("stage0*/**/*.py"):
        for name in re.findall(r'trace\.emit\(\s*"([\w.]+)"', path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(path.name)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_files_that_a_run_names_still_emit_its_events(name: str) -> None:
    said = {(event.name, event.src.partition(":")[0]) for event in events_of(name)}
    assert not {(event, file) for event, file in said if file not in emitters().get(event, set())}, "make recordings"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_small_and_does_not_say_where_it_was_made(name: str) -> None:
    text = b"".join(path.read_bytes() for path in (RECORDED / name).iterdir())
    assert len(text) < 700_000
    for place in {str(ROOT), str(Path.home()), tempfile.gettempdir(), "/tmp", "/home"} - {"/"}:
        assert place.encode() not in text, place
    paths = set(re.findall(rb'"/[^"]*"', text))
    assert paths <= {b'"/v1/completions"'}


def test_each_run_shows_what_it_is_about() -> None:
    mixed = story_of("mixed")
    chunks = [step for step in mixed.steps if any(s.num_tokens < s.missing for s in step.scheduled.values())]
    assert any(s.missing == 1 for step in chunks for s in step.scheduled.values()), "a chunk beside decode"
    assert len(mixed.requests) == 8 and len(story_of("one_request").requests) == 1
    assert sum(r.num_preemptions for r in story_of("preemption").requests.values()) >= 5
    again = story_of("preemption").requests.values()
    assert all(r.num_cached_tokens <= r.num_prompt_tokens for r in again), "what it computed itself is no prefix hit"
    hits = [r.num_cached_tokens for r in story_of("prefix_hits").requests.values()]
    assert hits[0] == 0 and min(hits[1:]) >= 16
    verified = [event.args for event in events_of("speculative") if event.name == "spec.verified"]
    assert sum(v["accepted"] for v in verified) > 0 and any(v["accepted"] < v["drafted"] for v in verified)
    assert [r.reason for r in story_of("client_abort").requests.values()] == ["abort", "length"]
    death = story_of("engine_death")
    assert [r.reason for r in death.requests.values()] == ["length", None] and len(death.steps) > 40
    assert any(event.name == "engine.dead" for event in events_of("engine_death"))
    nodes, servers = events_of("nodes2"), events_of("servers2")
    assert [event.args["engine"] for event in nodes if event.name == "dp.routed"] == [0, 1]
    assert {event.proc for event in nodes} == {"APIServer", "Node_1", "EngineCore_DP0", "EngineCore_DP1"}
    asked = Counter(event.proc for event in servers if event.name == "http.request")
    assert asked == {"APIServer_0": 2, "APIServer_1": 2}
    assert any(len(step.scheduled) == 2 for step in story_of("servers2").steps), "both at once"


@pytest.mark.parametrize("name", ["mixed", "preemption", "client_abort", *BUGS, *(f"{bug}_healthy" for bug in BUGS)])
def test_where_clients_come_together_the_engine_begins_when_all_are_there(name: str) -> None:
    """So recording again gives the same decisions on every machine (notebooks/gathering.py)."""
    story = story_of(name)
    assert story.steps[0].waiting == len(story.requests)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_changes_the_decisions_and_no_answer(name: str) -> None:
    def answers(run: str) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        names = numbered(story_of(run))
        for event in events_of(run):
            if event.name == "sched.token":
                tokens.setdefault(names[event.req or ""], []).extend(event.args["token_ids"])
        return tokens

    def decisions(run: str) -> list[dict[str, int]]:
        story = story_of(run)
        names = numbered(story)
        return [{names[r]: s.num_tokens for r, s in step.scheduled.items()} for step in story.steps]

    healthy = f"{name}_healthy"
    assert answers(name) == answers(healthy) and all(answers(name).values())
    assert decisions(name) != decisions(healthy)
    assert decisions(name)[0] == decisions(healthy)[0]


def test_the_planted_bugs_are_seen() -> None:
    def steps_without_a_token(run: str) -> Counter[str]:
        """Of each request, from its admission to its end."""
        story, silent = story_of(run), Counter[str]()
        names = numbered(story)
        for request_id, request in story.requests.items():
            first, last = request.spans[1].first_step, request.spans[-1].last_step
            silent[names[request_id]] = sum(request_id not in s.tokens for s in story.steps if first <= s.step <= last)
        return silent

    assert steps_without_a_token("bug_starvation")["r2"] > 5 * steps_without_a_token("bug_starvation_healthy")["r2"]
    assert steps_without_a_token("bug_stall")["r0"] >= 10 and not steps_without_a_token("bug_stall_healthy")["r0"]

    def leaked(run: str) -> int:
        held: Counter[int] = Counter()
        for event in events_of(run):
            if event.name in ("kv.allocated", "sched.prefix_hit"):
                held.update(event.args["blocks"])
            elif event.name == "kv.freed":
                held.subtract(event.args["blocks"])
        return sum(held.values())

    assert leaked("bug_leak") > 4 and leaked("bug_leak_healthy") == 0


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("command", [c for c in ("view", "show", "stats", "check", "figure", "why") if c in COMMANDS])
def test_every_command_works_on_every_run(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    request_id = list(story_of(name).requests)[-1]
    more = {
        "show": ["--req", request_id],
        "why": ["--req", request_id, "--step", "1"],
        "figure": ["token_budget", "--table"],
    }
    code = main([command, str(RECORDED / name), *more.get(command, [])])
    assert code in ((0, 1) if command == "check" else (0,)), capsys.readouterr().err
    assert capsys.readouterr().out
