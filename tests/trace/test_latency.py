"""Where the time of a request went: the parts add up to the whole, whatever was recorded, and mean what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stagetrace import VOCABULARY, Event, Recording, tell
from stagetrace.read.bounded import tell_bounded
from stagetrace.read.busy_time import StartUp, StepTime
from stagetrace.read.latency import PARTS, divide, of_request, percentile, split_tpot, split_ttft

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())
NAMES = {part.name for part in PARTS}


class Script:
    """Writes the events of a made-up run; each takes its own time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0

    def at(
        self,
        after: int,
        name: str,
        pid: int = 1,
        req: str | None = None,
        step: int | None = None,
        ph: str = "i",
        **args: Any,
    ) -> None:
        self.now += after
        cause = args.pop("cause", None)
        self.events.append(Event(1, len(self.events), self.now, pid, "P", ph, name, 8, "x:1", req, step, cause, args))


def request(script: Script, waits: list[int], req: str = "cmpl-a-0", head: str | None = None) -> None:
    """A request of 3 tokens in steps 1 to 3; preempted after the first, the second and third leave in one chunk."""
    wait = iter(waits)
    script.at(next(wait), "http.request", req=head or req)
    script.at(next(wait), "request.sampling_params", req=head or req)
    script.at(next(wait), "zmq.request_sent", req=req, type="ADD")
    script.at(next(wait), "zmq.request_received", 2, req)
    script.at(next(wait), "sched.queued", 2, req, num_prompt_tokens=4)
    for step in (1, 2, 3):
        script.at(next(wait), "engine.step", 2, step=step, ph="B", running=1, waiting=0)
        if step < 3:
            script.at(next(wait), "sched.admit" if step == 1 else "sched.resume", 2, req, step)
        missing = {1: 4, 2: 5, 3: 1}[step]
        script.at(
            1,
            "sched.scheduled",
            2,
            req,
            step,
            num_tokens=missing,
            num_computed=0,
            missing=missing,
            budget_left=9,
            new_blocks=[],
        )
        script.at(next(wait), "sched.token", 2, req, step, num_tokens=1, num_output_tokens=step)
        script.at(0, "engine.step", 2, step=step, ph="E")
        script.at(next(wait), "zmq.outputs_sent", 2, step=step)
        script.at(next(wait), "zmq.outputs_received", step=step, cause="2:0")
        if step == 1:
            script.at(next(wait), "sched.preempt", 2, req, 2, freed_blocks=1)
        script.at(next(wait), "request.detokenized", req=req, num_tokens=1)
        if step != 2:
            script.at(next(wait), "generate.yield", req=head or req, finished=step == 3)
            script.at(next(wait), "sse.chunk", req=head or req)


@given(st.lists(st.integers(0, 10**6), min_size=40, max_size=40), st.data())
def test_the_parts_add_up_whatever_was_recorded(waits: list[int], data: st.DataObject) -> None:
    script = Script()
    request(script, waits)
    dropped = data.draw(st.sets(st.sampled_from([event.name for event in script.events])))
    dropped -= {"sched.queued"} if "sched.token" not in dropped else set()  # no recorder drops these alone
    story = tell(event for event in script.events if event.name not in dropped)
    for told in story.requests.values():
        latency = of_request(told)
        assert sum(latency.ttft.values()) == (latency.ttft_ns or 0)
        assert sum(latency.gaps.values()) == (latency.gaps_ns or 0)
        assert latency.ttft.keys() | latency.gaps.keys() <= NAMES
        assert all(value > 0 for value in [*latency.ttft.values(), *latency.gaps.values()])


def test_each_part_is_the_time_that_the_token_spent_there() -> None:
    script = Script()
    request(script, [10**k for k in range(1, 17)] + [7, 5, 3] * 8)
    latency = of_request(tell(script.events).requests["cmpl-a-0"])
    # waits: http 10, params 10^2, sent 10^3, received 10^4, queued 10^5, step 10^6, admit 10^7, token 10^8, sent 10^9,
    # received 10^10, preempted 10^11, text 10^12, yield 10^13, chunk 10^14
    assert latency.arrival_ns == 10 and latency.num_tokens == 3
    assert latency.ttft == {
        "http": 10**2, "tokenize": 10**3, "ipc in": 10**4, "queue": 10**5 + 10**6 + 10**7, "prefill": 10**8 + 1,
        "ipc out": 10**9 + 10**10, "detokenize": 10**11 + 10**12, "response": 10**13 + 10**14,
    }  # fmt: skip
    # The client got token 1 after the preemption had begun; from then on it waits for token 2, which comes with token 3.
    assert latency.gaps["preempted"] == 10**15 + 10**16
    assert latency.gaps_ns == script.now - sum(10**k for k in range(1, 15)) - 1
    assert latency.tpot_ns == latency.gaps_ns / 2 and latency.gaps.keys() >= {
        "preempted",
        "prefill",
        "ipc out",
        "response",
    }


@given(st.integers(-50, 50), st.integers(-50, 50), st.lists(st.tuples(st.integers(-60, 60), st.sampled_from("abc"))))
def test_divide_adds_up_and_follows_the_clock(start: int, end: int, changes: list[tuple[int, str]]) -> None:
    assert sum(divide(start, end, "first", changes).values()) == end - start
    if start <= end:
        ordered = sorted(changes, key=lambda change: change[0])
        slow: dict[str, int] = {}
        for now in range(start, end):  # nanosecond by nanosecond
            part = ([what for time, what in ordered if time <= now] or ["first"])[-1]
            slow[part] = slow.get(part, 0) + 1
        assert divide(start, end, "first", ordered) == slow


DEATHS = ("engine_death", "dp2_death")


@pytest.mark.parametrize("run", RUNS)
def test_recorded_runs(run: str) -> None:
    story = tell(Recording(RECORDED / run))
    latencies = [of_request(told) for told in story.requests.values()]
    for latency, told in zip(latencies, story.requests.values(), strict=True):
        assert sum(latency.ttft.values()) == latency.ttft_ns and sum(latency.gaps.values()) == (latency.gaps_ns or 0)
        assert all(value > 0 for value in [*latency.ttft.values(), *latency.gaps.values()])
        left = told.chunk_ns[0] if told.chunk_ns else told.first["http.response"]
        assert latency.ttft_ns == left - told.first["http.request"]
        assert latency.num_tokens <= told.num_output_tokens or run in DEATHS
        computed_again = "preempted" in latency.gaps or (run in DEATHS and len(told.engines) > 1 and latency.streamed)
        assert computed_again == ("prefill" in latency.gaps) and ("preempted" in latency.gaps) == (
            told.num_preemptions > 0
        )
        assert "decode" in latency.gaps or latency.reason in (None, "abort") or not latency.streamed
        assert "unrecorded" not in latency.ttft or run in DEATHS
    for split, each in ((split_ttft(latencies), "ttft"), (split_tpot(latencies), "tpot")):
        assert split is not None
        assert sum(part.mean for part in split.parts.values()) == pytest.approx(split.whole.mean)
        assert (
            split.whole.p50
            <= split.whole.p90
            <= split.whole.p99
            == max(getattr(one, f"{each}_ns") or 0 for one in latencies)
        )


@pytest.mark.parametrize("run", RUNS)
def test_bounded_telling_says_the_same(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagetrace.read.bounded.NUM_ENDED_KEPT", 4)
    whole = tell(Recording(RECORDED / run))
    told: list[Any] = []
    steps: list[Any] = []
    tell_bounded(Recording(RECORDED / run), told.append, steps.append)
    assert len(told) == len(whole.requests) and {one.request_id: one for one in told} == whole.requests
    complete = [step for step in whole.steps if step.end_ns]  # num_changes counts in Story.blocks, which is not kept
    for engine in whole.engines:
        own = [replace(step, num_changes=0) for step in steps if step.engine == engine]
        assert own == [replace(step, num_changes=0) for step in complete if step.engine == engine]


def test_the_answers_and_prompts_of_one_http_request_share_its_arrival_and_chunks() -> None:
    script = Script()
    script.at(5, "http.request", req="cmpl-a-0")
    script.at(5, "request.validated", req="cmpl-a-0", prompts=2)
    script.at(5, "request.sampling_params", req="cmpl-a-0")
    script.at(5, "request.fanned_out", req="cmpl-a-1", children=2)
    for child in ("0_cmpl-a-1", "1_cmpl-a-1", "cmpl-a-0"):
        script.at(10, "request.detokenized", req=child, num_tokens=1)
    script.at(10, "generate.yield", req="cmpl-a-1", finished=True)
    script.at(10, "sse.chunk", req="cmpl-a-0")
    script.at(10, "generate.yield", req="cmpl-a-0", finished=True)
    script.at(10, "sse.chunk", req="cmpl-a-0")
    script.at(10, "request.detokenized", req="cmpl-a-0", num_tokens=1)  # nobody is handed this one
    script.at(10, "sse.chunk", req="cmpl-a-0")
    story = tell(script.events)
    assert of_request(story.requests["cmpl-a-0"]).num_tokens == 1
    ttft = {name: of_request(told).ttft_ns for name, told in story.requests.items()}
    assert ttft == {"cmpl-a-0": 85, "cmpl-a-1": None, "0_cmpl-a-1": 65, "1_cmpl-a-1": 65}


@pytest.mark.parametrize("answers", [1, 2])
def test_a_whole_answer_waits_for_its_last_token_and_has_no_tpot(answers: int) -> None:
    """While the first token waits for the others in the front end, the client waits for steps of the engine."""
    script = Script()
    script.at(1, "http.request", req="cmpl-a-0")
    script.at(2, "request.sampling_params", req="cmpl-a-0")
    names = ["cmpl-a-0"] if answers == 1 else ["0_cmpl-a-0", "1_cmpl-a-0"]
    if answers == 2:
        script.at(0, "request.fanned_out", req="cmpl-a-0", children=2)
    for name in names:
        script.at(0, "sched.queued", 2, name, num_prompt_tokens=4)
        script.at(0, "sched.admit", 2, name, 1)
    for step, missing in ((1, 4), (2, 1), (3, 1)):
        for name in names:
            given_now = {"num_tokens": missing, "num_computed": 0, "missing": missing, "budget_left": 9}
            script.at(0, "sched.scheduled", 2, name, step, **given_now, new_blocks=[])
        script.at(100, "engine.step", 2, step=step, ph="E")
        for name in names:
            script.at(0, "sched.token", 2, name, step, num_tokens=1, num_output_tokens=step)
            script.at(0, "request.detokenized", req=name, num_tokens=1)
    script.at(5, "generate.yield", req="cmpl-a-0", finished=True)
    script.at(5, "http.response", req="cmpl-a-0")
    requests = tell(script.events).requests
    for latency in (of_request(requests[name]) for name in names):
        assert latency.ttft == {"http": 2, "prefill": 100, "decode": 200, "response": 10}
        assert latency.num_tokens == 3 and not latency.streamed and latency.tpot_ns is None


def test_a_stop_string_is_no_abort_though_the_engine_is_told_to_abort() -> None:
    script = Script()
    script.at(1, "sched.queued", 2, "r0", num_prompt_tokens=2)
    script.at(1, "request.finished", req="r0", reason="stop", num_output_tokens=8)
    script.at(1, "sched.finished", 2, "r0", 9, reason="abort", freed_blocks=1, by="outside")
    script.at(1, "sched.queued", 2, "r1", num_prompt_tokens=2)
    script.at(1, "sched.finished", 2, "r1", 9, reason="abort", freed_blocks=1, by="outside")
    reasons = {name: told.reason for name, told in tell(script.events).requests.items()}
    assert reasons == {"r0": "stop", "r1": "abort"}


def test_the_client_of_a_beam_search_waits_for_the_search() -> None:
    script = Script()
    script.at(1, "http.request", req="cmpl-a-0")
    script.at(2, "request.sampling_params", req="cmpl-a-0")
    script.at(3, "beam.start", req="cmpl-a-0", num_prompt_tokens=2)
    script.at(400, "beam.finished", req="cmpl-a-0", num_output_tokens=5, reason="length")
    script.at(5, "http.response", req="cmpl-a-0", status=200)
    latency = of_request(tell(script.events).requests["cmpl-a-0"])
    assert latency.ttft == {"http": 2, "tokenize": 3, "decode": 400, "response": 5} and latency.ttft_ns == 410
    assert latency.num_tokens == 5 and latency.tpot_ns is None


@pytest.mark.parametrize("run", RUNS)
def test_the_steps_add_up_to_the_time_of_the_engine(run: str) -> None:
    events = list(Recording(RECORDED / run))
    story, start_up = tell(events), StartUp()
    for event in events:
        start_up.feed(event)
    for engine in story.engines:
        steps, complete = StepTime(), [step for step in story.steps if step.end_ns and step.engine == engine]
        for step in complete:
            steps.feed(step)
        # a step that the engine's death cut has no end
        whole = complete[-1].end_ns - complete[0].start_ns if complete else 0
        assert steps.total_ns == whole and min(steps.parts.values()) >= 0
    servers = {event.proc: event for event in events if event.name == "server.listening"}
    assert len(servers) == (2 if run == "servers2" else 1)
    for name, listening in servers.items():
        begun = next(event for event in events if event.proc == name and 0 < event.phase <= 5)
        times = [time for (proc, _), time in start_up.parts.items() if proc == name]
        assert sum(times) == listening.ts - begun.ts


def test_start_up_tells_work_from_waiting_and_knows_the_imports_of_the_engine() -> None:
    now, start_up = 0, StartUp()

    def at(after: int, name: str, process: int, /, **args: Any) -> None:
        nonlocal now
        now += after
        phase = VOCABULARY[name].phase
        start_up.feed(
            Event(1, 1, now, process, {1: "APIServer", 2: "Engine"}[process], "i", name, phase, "x:1", args=args)
        )

    at(5, "cli.main", 1)
    at(10, "server.socket_bound", 1)
    at(20, "engine.spawned", 1, pid=2)
    at(30, "tokenizer.loaded", 1)
    at(40, "http.request", 1)  # somebody asks for its health
    at(1, "http.response", 1)
    at(50, "server.state_ready", 1)
    at(900, "engine.hello", 2)  # the process has started, and imported torch
    at(2, "engine.init_sent", 1)
    at(70, "weights.loaded", 2)
    at(3, "engine.busy_loop", 2)
    at(4, "output_handler.started", 1)
    at(6, "server.listening", 1)
    at(7, "http.request", 1)
    told = {(proc, part.name): time for (proc, part), time in start_up.parts.items()}
    assert told.pop(("Engine", "EngineCore: the process starts, and imports torch")) == 30 + 40 + 1 + 50 + 900
    assert told.pop(("APIServer", "waits for the engine")) == 902 + 70 + 3 + 4
    assert told == {
        ("APIServer", "CLI"): 0, ("APIServer", "API server"): 10 + 91 + 6, ("APIServer", "AsyncLLM"): 30,
        ("APIServer", "EngineCore"): 20, ("Engine", "EngineCore"): 2 + 70 + 3,
    }  # fmt: skip


@pytest.mark.parametrize("cached", [False, True])
def test_the_compiler_of_a_grammar_is_no_queue(cached: bool) -> None:
    script = Script()
    script.at(1, "zmq.request_sent", req="r0", type="ADD")
    script.at(1, "zmq.request_received", 2, "r0")
    if cached:
        script.at(3, "grammar.compiled", 2, "r0")
    script.at(5, "sched.queued", 2, "r0", num_prompt_tokens=2)
    if not cached:
        script.at(70, "grammar.compiled", 2, "r0")
    script.at(9, "sched.admit", 2, "r0", 1)
    script.at(20, "sched.token", 2, "r0", 1, num_tokens=1, num_output_tokens=1)
    script.at(4, "request.detokenized", req="r0", num_tokens=1)
    parts = of_request(tell(script.events).requests["r0"]).ttft
    expected = {"ipc in": 1, "queue": 5 + 9 + 3 * cached, "prefill": 20, "detokenize": 4}
    assert parts == expected | ({} if cached else {"grammar": 70})


@given(st.lists(st.integers(), min_size=1), st.integers(1, 100))
def test_percentiles_are_values_that_occurred(values: list[int], percent: int) -> None:
    values.sort()
    result = percentile(values, percent)
    assert result in values
    assert sum(value <= result for value in values) * 100 >= percent * len(values)
    below = [value for value in values if value < result]
    assert len(below) * 100 < percent * len(values)


def test_a_prompt_is_computed_once_however_late_the_next_step_begins() -> None:
    """The client has its first token before the second step begins: the wait for the second one is decode."""
    script = Script()
    script.at(1, "sched.queued", 2, "r0", num_prompt_tokens=2)
    script.at(1, "sched.admit", 2, "r0", 1)
    for step, missing in ((1, 2), (2, 1)):
        script.at(
            50,
            "sched.scheduled",
            2,
            "r0",
            step,
            num_tokens=missing,
            num_computed=0,
            missing=missing,
            budget_left=9,
            new_blocks=[],
        )
        script.at(10, "sched.token", 2, "r0", step, num_tokens=1, num_output_tokens=step)
        script.at(5, "request.detokenized", req="r0", num_tokens=1)
    latency = of_request(tell(script.events).requests["r0"])
    assert latency.gaps == {"decode": 60, "detokenize": 5} and latency.ttft == {
        "queue": 1,
        "prefill": 60,
        "detokenize": 5,
    }
