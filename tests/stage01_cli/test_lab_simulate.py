"""The laboratory decides as the engine does, ends whatever it is given, and says what is wrong in one sentence."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, strategies as st
from lab_scenarios import SCENARIOS, decisions, scenario_of
from server_under_test import byte_config

from stage01_cli.tools.lab.bench import ENDED, KINDS, PREEMPTED, TOKEN, Bench
from stage01_cli.tools.lab.own_scheduler import OwnScheduler
from stage01_cli.tools.lab.page import read_static
from stage01_cli.tools.lab.scenario import MAX_REQUESTS, MAX_STEPS, Scenario, read_scenario
from stage01_cli.tools.lab.simulate import simulate
from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.core.worker import Executor
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams
from stagetrace import VOCABULARY, Event, read_run, trace
from stagetrace.check.reasons import explain
from stagetrace.event import decode_line, encode

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
NAMED = json.loads(read_static("scenarios.json"))


def scenario(*requests: dict[str, Any], **settings: Any) -> dict[str, Any]:
    named = [{"id": chr(ord("a") + place)} | request for place, request in enumerate(requests)]
    return {"settings": settings, "requests": named}


# As the engine


class TableExecutor(Executor):
    """An executor without a model: it follows each request as a worker does, and samples the laboratory's made-up tokens."""

    scenario: Scenario

    def __init__(self, config: VllmConfig) -> None:
        self.computed: dict[str, int] = {}
        self.known: dict[str, int] = {}

    def kv_block_bytes(self) -> int:
        return 1

    def determine_available_memory(self) -> int:
        raise AssertionError("the number of blocks is given")

    def initialize_kv_cache(self, num_blocks: int) -> None:
        pass

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for new in output.scheduled_new_reqs:
            self.computed[new.request_id], self.known[new.request_id] = new.num_computed_tokens, len(new.token_ids)
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            self.computed[name] += count
            if self.computed[name] == self.known[name]:
                arrival = next(each for each in self.scenario.requests if each.id == name)
                sampled[name] = [arrival.token(self.known[name])]
                self.known[name] += 1
        return ModelRunnerOutput(sampled)

    def shutdown(self) -> None:
        pass


def engine_events(wanted: Scenario, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The same load in the real `EngineCore`."""
    options = wanted.settings
    config = byte_config((options.num_gpu_blocks_override - 1) * options.block_size)
    sections = {"scheduler_config": options.scheduler_config, "cache_config": options.cache_config}
    config = VllmConfig(model_config=config.model_config, **sections)
    monkeypatch.setattr(TableExecutor, "scenario", wanted, raising=False)
    monkeypatch.setattr(Executor, "get_class", lambda config: TableExecutor)
    events: list[Event] = []
    core = EngineCore(config)
    trace.watch(lambda event: events.append(decode_line(encode(event))), list(VOCABULARY))
    try:
        coming, step = sorted(wanted.requests, key=lambda each: each.arrival), 0
        while coming or core.has_unfinished_requests:
            step += 1
            while coming and coming[0].arrival <= step:
                each = coming.pop(0)
                prompt = [each.token(position) for position in range(each.prompt)]
                params = SamplingParams(max_tokens=each.output, ignore_eos=True)
                core.add_request(EngineCoreRequest(each.id, prompt, params, priority=each.priority))
            if core.has_unfinished_requests:
                core.step()
    finally:
        trace.watch(None)
        core.shutdown()
    return events


TIGHT = {
    "settings": {
        "max_num_batched_tokens": 5,
        "num_gpu_blocks_override": 8,
        "block_size": 4,
        "enable_prefix_caching": False,
    },
    "requests": [{"id": "a", "prompt": 5, "output": 16}, {"id": "b", "prompt": 5, "output": 16}],
}
"""One is preempted with output, and computes both again in several chunks."""


@given(SCENARIOS)
@example(TIGHT)
def test_every_decision_is_the_engines(value: dict[str, Any]) -> None:
    room = (value["settings"]["num_gpu_blocks_override"] - 1) * value["settings"]["block_size"]
    # an engine has room for each
    fitting = [each for each in value["requests"] if each["prompt"] + each["output"] < room]
    assume(fitting)
    wanted = read_scenario(value | {"requests": fitting})
    if not wanted.settings.enable_chunked_prefill:  # nor does one start whose prompts exceed the budget for good
        assume(all(each.prompt + each.output < wanted.settings.max_num_batched_tokens for each in wanted.requests))
    bench = Bench(wanted)
    bench.run(Scheduler)
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = engine_events(wanted, monkeypatch)
    assert decisions(bench.events, {}) == decisions(engine, {})


@pytest.mark.parametrize("name", ["one_request", "mixed", "preemption"])
def test_a_recorded_engine_decided_the_same(name: str) -> None:
    """With the real model, behind HTTP. Block numbers too: the null block, the order of reuse, the evictions. (Not `prefix_hits`: there
    the model gave equal answers to equal prompts, and so the answers share blocks.)"""
    events = read_run(RECORDED / name).events
    value = scenario_of(events)
    bench = Bench(read_scenario(value))
    bench.run(Scheduler)
    queued = [event.req or "" for event in events if event.name == "sched.queued"]
    names = {request_id: f"r{place}" for place, request_id in enumerate(queued)}
    right = decisions(events, names)
    mine = decisions(bench.events, {})
    # The recorded cache may have more blocks than the laboratory: how many are free is told, and nobody needed them.
    fewer = (
        next(e.args["num_blocks"] for e in events if e.name == "scheduler.created")
        - value["settings"]["num_gpu_blocks_override"]
    )
    for _, _, args in mine:
        for key in {"free_blocks", "free_before"} & args.keys():
            args[key] += fewer
    assert mine == right
    assert len(mine) > 20


@pytest.mark.parametrize("name", ["mixed", "preemption"])
def test_a_reason_is_the_one_that_why_gives(name: str) -> None:
    events = read_run(RECORDED / name).events
    queued = [event.req or "" for event in events if event.name == "sched.queued"]
    answer = simulate(scenario_of(events))
    seen = 0
    for place, request_id in enumerate(queued):
        of_step = answer["why"][f"r{place}"]
        for step in explain(RECORDED / name, request_id):
            mine = [answer["texts"][i] for i in of_step[step.step]]
            for (rule, text), reason in zip(mine, step.reasons, strict=True):
                right = reason.text
                for other, full in enumerate(queued):
                    right = right.replace(full, f"r{other}")
                seen += text == right
                assert rule == reason.rule
                assert answer["rules"][rule] == reason.places
                assert text == right or "free" in right or "running request" in right
    assert seen > 50


# What the picture shows


def cells(answer: dict[str, Any], name: str) -> str:
    """A letter per step: w(aiting), p(refill), d(ecode), x (preempted), n(othing)."""
    letters = dict(zip(KINDS, "wpdxn"))
    return "".join(letters[KINDS[cell[0]]] for cell in answer["cells"][name].values())


def test_the_five_scenarios_show_what_they_promise() -> None:
    runs = {each["name"]: simulate({key: each[key] for key in ("settings", "requests")}) for each in NAMED}
    assert list(runs) == ["Chunked prefill", "Preemption", "Shared prefix", "Priority", "Head-of-line blocking"]
    assert all(run["problem"] is None for run in runs.values())
    assert cells(runs["Chunked prefill"], "d").count("p") == 7 and cells(runs["Chunked prefill"], "e").startswith("ww")
    assert {facts["id"] for facts in runs["Preemption"]["requests"] if facts["preemptions"]} == {"c"}
    assert [facts["cached"] for facts in runs["Shared prefix"]["requests"]] == [0, 48, 48, 0]
    begin = {facts["id"]: facts["admitted"] for facts in runs["Priority"]["requests"]}
    assert begin["d"] < begin["e"] < begin["c"]
    line = runs["Head-of-line blocking"]
    begin = {facts["id"]: facts["admitted"] for facts in line["requests"]}
    assert begin["b"] == 19 and all(begin[name] >= 19 for name in "cde"), "nobody overtakes"
    (first, *_) = (line["texts"][place][1] for place in line["why"]["c"][4])
    assert first.startswith("It waits, number 2 in the queue, behind b")


def test_a_preempted_request_is_drawn_as_one() -> None:
    answer = simulate({key: NAMED[1][key] for key in ("settings", "requests")})
    marked = [step for step, cell in answer["cells"]["c"].items() if cell[5] & PREEMPTED]
    assert len(marked) == 1 and answer["cells"]["c"][marked[0]][:2] == [KINDS.index("preempted"), 0]
    assert "c" not in answer["steps"][marked[0] - 1]["tables"]
    rule, text = answer["texts"][answer["why"]["c"][marked[0]][0]]
    assert (rule, text[:17]) == ("preempt", "It was preempted:")


def test_a_prompt_in_pieces_of_one_token_is_no_decode() -> None:
    answer = simulate(scenario({"prompt": 3, "output": 3}, max_num_batched_tokens=1))
    assert cells(answer, "a") == "pppdd"


def test_the_settings_reach_the_scheduler() -> None:
    """Each by what it changes."""
    two = ({"prompt": 20, "output": 4}, {"prompt": 20, "output": 4, "prefix": "A", "shared": 16})

    def first_step(**settings: Any) -> list[int]:
        answer = simulate(scenario(*two, **settings))
        return [answer["cells"][name][1][1] for name in "ab"]

    assert first_step() == [20, 20]
    assert first_step(max_num_batched_tokens=30) == [20, 10]
    assert first_step(max_num_batched_tokens=30, enable_chunked_prefill=False) == [20, 0]
    assert first_step(max_num_seqs=1) == [20, 0]
    assert first_step(num_gpu_blocks_override=4) == [20, 0]
    assert first_step(num_gpu_blocks_override=7, block_size=10) == [20, 20]
    assert first_step(long_prefill_token_threshold=3) == [3, 3]
    again = scenario(*(each | {"prefix": "A", "shared": 16} for each in two))
    assert [facts["cached"] for facts in simulate(again)["requests"]] == [0, 16]
    again["settings"]["enable_prefix_caching"] = False
    assert [facts["cached"] for facts in simulate(again)["requests"]] == [0, 0]
    urgent = scenario({"prompt": 20, "priority": 1}, {"prompt": 20}, max_num_seqs=1, scheduling_policy="priority")
    assert [facts["admitted"] for facts in simulate(urgent)["requests"]] == [17, 1]
    turns = {
        "settings": {"max_num_seqs": 1, "scheduling_policy": "fair"},
        "requests": [{"id": name} for name in ("cmpl-x-0", "cmpl-x-1", "b")],
    }
    assert [facts["admitted"] for facts in simulate(turns)["requests"]] == [1, 33, 17]


def test_why_says_that_hits_take_free_blocks_too() -> None:
    """What a preempted request finds again lies in free blocks: four of them, and the fifth is missing."""
    answer = simulate(
        scenario(
            {"prompt": 20, "output": 10}, {"arrival": 2, "prompt": 30, "output": 12},
            max_num_batched_tokens=16, num_gpu_blocks_override=9, block_size=8, max_num_seqs=4,
        )
    )  # fmt: skip
    (reason,) = (answer["texts"][place][1] for place in answer["why"]["b"][8])
    assert reason == (
        "It waits, first in the queue: the tokens that the prefix cache has of it lie in free blocks, and with the next ones it would take "
        "more than the 4 free blocks."
    )


def test_steps_are_those_of_the_time_line_while_nobody_is_there() -> None:
    answer = simulate(scenario({"prompt": 4, "output": 2}, {"prompt": 4, "output": 2, "arrival": 6}))
    assert [step["idle"] for step in answer["steps"]] == [False, False, True, True, True, False, False]
    assert list(answer["why"]["b"]) == [6, 7] and answer["before"][6]
    assert [facts["ended"] for facts in answer["requests"]] == [2, 7]


# Whatever it is given


@given(SCENARIOS)
def test_any_scenario_ends_and_its_books_are_right(value: dict[str, Any]) -> None:
    answer = simulate(value)
    options = answer["settings"]
    total = options["num_gpu_blocks_override"] - 1
    for step in answer["steps"]:
        held = {block for table in step["tables"].values() for block in table}
        assert len(held) + step["free"] == total and 0 not in held
        assert set(step["cached"]) <= set(range(1, total + 1))
        given_now = {name: of[step["step"]][1] for name, of in answer["cells"].items() if step["step"] in of}
        assert sum(given_now.values()) == step["used"] <= options["max_num_batched_tokens"]
        assert sum(count > 0 for count in given_now.values()) <= options["max_num_seqs"]
    for facts in answer["requests"]:
        steps = list(answer["cells"][facts["id"]])
        assert steps == list(range(facts["arrival"], facts["arrival"] + len(steps)))
        tokens = sum(bool(cell[5] & TOKEN) for cell in answer["cells"][facts["id"]].values())
        if facts["ended"]:
            assert facts["ended"] == steps[-1] and tokens == facts["tokens"] == facts["output"]
            assert answer["cells"][facts["id"]][facts["ended"]][5] & ENDED
        else:
            assert facts["id"] in answer["problem"] or "more" in answer["problem"]
    assert len(answer["steps"]) <= MAX_STEPS
    assert (answer["problem"] is None) == all(facts["ended"] for facts in answer["requests"])
    json.dumps(answer)


def test_the_same_scenario_gives_the_same_answer() -> None:
    value = {key: NAMED[1][key] for key in ("settings", "requests")}
    assert simulate(value) == simulate(json.loads(json.dumps(value)))


def test_a_request_that_never_fits_is_said_to_be_stuck() -> None:
    answer = simulate(scenario({"prompt": 40}, {"prompt": 4}, num_gpu_blocks_override=4, block_size=8))
    assert answer["problem"] == "No token was scheduled in steps 1 to 3, and nothing will change: a and b cannot go on."
    answer = simulate(scenario({"prompt": 8, "output": 30}, num_gpu_blocks_override=3, block_size=8))
    assert answer["problem"] == "No token was scheduled in steps 10 to 12, and nothing will change: a cannot go on."
    assert cells(answer, "a") == "pddddddddxxx"


def test_a_long_run_is_cut() -> None:
    answer = simulate(scenario({"prompt": 4000, "output": 500}, max_num_batched_tokens=8, num_gpu_blocks_override=513))
    assert answer["problem"] == f"After {MAX_STEPS} steps a had not ended: the simulation stops here."


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "a scenario must be an object"),
        ({"requests": [{"id": "a"}], "code": "1"}, "a scenario has no 'code'"),
        ({"requests": []}, f"a scenario has 1 to {MAX_REQUESTS} requests, not 0"),
        ({"requests": "abc"}, "requests must be a list"),
        ({"requests": [{"id": f"r{i}"} for i in range(65)]}, "1 to 64 requests, not 65"),
        ({"requests": [{"id": "a"}, {"id": "a"}]}, "two requests are called a"),
        ({"requests": [{"id": "<b>"}]}, "request number 1: id must be 1 to 12 letters, digits, - or _"),
        ({"requests": [{"id": "a", "prompt": 0}]}, "prompt of request a must be a whole number from 1 to 4096"),
        ({"requests": [{"id": "a", "prompt": True}]}, "prompt of request a must be a whole number"),
        ({"requests": [{"id": "a", "output": 1.5}]}, "output of request a must be a whole number"),
        (
            {"requests": [{"id": "a", "shared": 17, "prefix": "A"}]},
            "request a shares 17 tokens, but its prompt has only 16",
        ),
        ({"requests": [{"id": "a", "prefix": "AB"}]}, "prefix of request a must be one of A, B, C, D, or empty"),
        ({"requests": [{"id": "a", "colour": 1}]}, "request number 1 has no 'colour'"),
        ({"requests": [7]}, "request number 1 must be an object"),
        ({"requests": [{"id": "a"}], "settings": []}, "settings must be an object"),
        (scenario({}, block_size=129), "block_size must be a whole number from 1 to 128"),
        (scenario({}, scheduling_policy="lifo"), "scheduling_policy must be one of fcfs, priority, fair"),
        (scenario({}, scheduling_policy=["fcfs"]), "scheduling_policy must be one of fcfs, priority, fair"),
        (scenario({}, enable_prefix_caching=1), "enable_prefix_caching must be true or false"),
    ],
)
def test_a_malformed_scenario_gets_a_sentence(value: Any, sentence: str) -> None:
    assert sentence in simulate(value)["problem"]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["settings", "requests", "id", "prompt", "prefix", "block_size"]), inner, max_size=4)))  # fmt: skip
def test_any_json_gets_an_answer(value: Any) -> None:
    assert isinstance(json.loads(json.dumps(simulate(value)))["problem"], str | None)


# A scheduler of one's own

HEAD = "from stage03_engine.core.scheduler import Scheduler\n\n\nclass Mine(Scheduler):\n"


def own(body: str) -> dict[str, Any]:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return simulate(scenario({"prompt": 20}, {"prompt": 4}, max_num_batched_tokens=8), OwnScheduler(text=HEAD + lines))


def test_a_scheduler_of_ones_own_decides() -> None:
    value = {key: NAMED[4][key] for key in ("settings", "requests")}
    text = read_static("own_scheduler.txt")
    mine, reference = simulate(value, OwnScheduler(text=text)), simulate(value)
    assert mine["problem"] is None
    begin = [[facts["admitted"] for facts in run["requests"]] for run in (mine, reference)]
    assert begin[0][2:] < begin[1][2:], "the short ones overtake"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def schedule(self):\n    return 1 / 0", "Step 1: ZeroDivisionError: division by zero [your scheduler, line 6: return 1 / 0]"),
        ("def schedule(self):\n    raise SystemExit(3)", "Step 1: SystemExit: 3 [your scheduler, line 6: raise SystemExit(3)]"),
        ("def __init__(self):\n    pass", "TypeError: Mine.__init__() takes 1 positional argument but 5 were given"),
        ("def schedule(self:", "SyntaxError: '(' was never closed [your scheduler, line 5: def schedule(self:]"),
        ("def _limited(self, num_tokens, budget):\n    return num_tokens", "Step 1: the scheduler gave 20 tokens, and the budget is 8."),
        ("def _schedule_waiting(self, output, budget):\n    pass", "No token was scheduled in steps 1 to 3, and nothing will change: a and b cannot go on."),
        ("def schedule(self):\n    output = super().schedule()\n    output.num_scheduled_tokens['z'] = 1\n    return output",
         "KeyError"),
        ("def update_from_output(self, output, ran):\n    outputs = super().update_from_output(output, ran)\n    self.kv_cache_manager.block_pool.allocate(1)\n    return outputs",
         "After step 1 the scheduler's state contradicts itself: tables and pool disagree."),
        ("def schedule(self):\n    return None", "Step 1: AttributeError: 'NoneType' object has no attribute"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_said(body: str, sentence: str) -> None:
    problem = own(body)["problem"]
    assert sentence in problem or (sentence == "KeyError" and "gave tokens to z, which is not in the engine" in problem)


def test_it_may_print() -> None:
    answer = own("def schedule(self):\n    print('step', self.step + 1)\n    return super().schedule()")
    assert answer["problem"] is None
    assert answer["printed"].startswith("step 1\nstep 2\n")
    answer = own("def schedule(self):\n    print('x' * 9_000)\n    return super().schedule()")
    assert len(answer["printed"]) == 10_000


def test_one_that_emits_nothing_is_drawn_without_reasons() -> None:
    """It decides by itself, and tells the trace nothing."""
    answer = own(
        "def schedule(self):\n    from stagetrace import trace\n    watcher = trace._watcher\n    trace.watch(None)\n"
        "    try:\n        return super().schedule()\n    finally:\n        trace.watch(watcher, ['sched.queued'])"
    )
    assert answer["problem"] is None
    assert cells(answer, "a").startswith("pp")


def test_it_may_hold_dataclasses() -> None:
    answer = simulate(
        scenario({}),
        OwnScheduler(
            text="from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Note:\n    step: int\n"
            + HEAD
            + "    note = Note(1)"
        ),
    )
    assert answer["problem"] is None


def test_a_text_without_a_class_says_so() -> None:
    answer = simulate(scenario({}), OwnScheduler(text="x = 1"))
    assert answer["problem"] == "the text defines no class; begin with: class MyScheduler(Scheduler):"


def test_what_is_left_of_a_run_stays_in_sight() -> None:
    """A scheduler that fails late: the steps before are drawn."""
    answer = own("def schedule(self):\n    assert self.step < 4, 'four is enough'\n    return super().schedule()")
    assert answer["problem"].startswith("Step 5: AssertionError: four is enough [your scheduler, line 6")
    assert [step["step"] for step in answer["steps"]] == [1, 2, 3, 4]
    assert all(a < b for a, b in pairwise(answer["cells"]["a"]))
