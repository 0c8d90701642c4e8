"""`--async-scheduling` in the real engine: the same answers, steps that really overlap, and a clear no to what cannot be combined.

The scheduler alone is in test_scheduler_stateful.py, replay in test_replay.py, random workloads in test_differential.py.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_engine import record

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core_proc import make_core
from stage03_engine.core.features.async_scheduling.async_core import AsyncEngineCore
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.features.in_process.inproc_client import InprocClient
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest, FinishReason
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams
from stagetrace import Event, read_run
from stagetrace.export.perfetto import PerfettoWriter
from stagetrace.read.busy_time import StepTime
from stagetrace.read.story import tell

SMALL: dict[str, Any] = {
    "model": "gpt2-tiny", "max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 40,
    "max_num_seqs": 6,
}  # fmt: skip
PROMPT = list(range(300, 320))


def core_of(**settings: Any) -> AsyncEngineCore:
    core = make_core(EngineArgs.from_kwargs(**SMALL | {"async_scheduling": True} | settings))
    assert isinstance(core, AsyncEngineCore)
    return core


@pytest.fixture(scope="module")
def core() -> Iterator[AsyncEngineCore]:
    core = core_of(profiler_dir=None)
    yield core
    core.shutdown()


def ask(core: AsyncEngineCore, name: str, prompt: list[int] = PROMPT, **params: Any) -> None:
    core.add_request(EngineCoreRequest(name, prompt, SamplingParams(temperature=0, **params), eos_token_id=None))


def run(core: AsyncEngineCore) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Step until nothing is left, not even in flight: what each request received, and how it ended."""
    answers: dict[str, tuple[list[int], FinishReason | None]] = {}
    while core.has_unfinished_requests:
        for output in core.step().outputs:
            tokens, reason = answers.get(output.request_id, ([], None))
            assert reason is None, "a request spoke after its end"
            answers[output.request_id] = (tokens + output.new_token_ids, output.finish_reason)
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_usable
    return answers


# What requests may ask for

ASKED: dict[str, SamplingParams] = {
    "greedy, to the last token of the context": SamplingParams(temperature=0, max_tokens=96, ignore_eos=True),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "seed": SamplingParams(temperature=0.9, seed=7, max_tokens=30),
    "no seed": SamplingParams(temperature=0.9, max_tokens=30),
    "logprobs": SamplingParams(temperature=0.5, seed=2, logprobs=3, max_tokens=20),
    "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=12),
    "penalties": SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2, max_tokens=40),
    "bad words, bias, min_tokens": SamplingParams(
        temperature=0, bad_words=["the", " my lord"], logit_bias={400: 5.0}, min_tokens=9, max_tokens=20
    ),
    "stop tokens": SamplingParams(seed=3, max_tokens=40, stop_token_ids=list(range(200, 700))),
    "stop string": SamplingParams(temperature=0, max_tokens=40, stop=["the", "my lord"]),
    "two answers": SamplingParams(seed=1, max_tokens=20, n=2),
    "grammar": SamplingParams(seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="(yes|no){3,6}!")),
}  # fmt: skip


def answers_of(llm: LLM) -> list[Any]:
    """All kinds at once over a small cache; then some of them alone, without the grammar that forbids looking ahead."""
    prompts = [f"KING RICHARD:\nMy lord, my lord, {kind}" for kind in ASKED]
    few = [kind for kind in ASKED if kind != "grammar"]
    outputs = llm.generate(prompts, list(ASKED.values()))
    outputs += llm.generate([prompts[list(ASKED).index(kind)] for kind in few], [ASKED[kind] for kind in few])
    return [
        (c.text, c.token_ids, c.finish_reason, c.stop_reason, _rounded(c.logprobs), _rounded(output.prompt_logprobs))
        for output in outputs
        for c in output.outputs
    ]


def _rounded(logprobs: Any) -> Any:
    return None if logprobs is None else json.dumps(logprobs, default=lambda o: round(getattr(o, "logprob", 0.0), 3))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.slow(keep="fcfs")
def test_every_kind_of_request_gets_the_same_answer(policy: str) -> None:
    both = []
    for ahead in (False, True):
        with LLM(**SMALL, scheduling_policy=policy, async_scheduling=ahead) as llm:
            both.append(answers_of(llm))
            assert isinstance(llm.engine_core, InprocClient)
            assert llm.engine_core._core.scheduler.make_stats().num_preemptions > 0, "void: blocks were never scarce"
    assert both[0] == both[1]


def test_an_engine_process_gives_the_same_answers() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(**SMALL) as llm, LLM(**SMALL, async_scheduling=True, multiprocess=True) as ahead:
        assert (
            ahead.generate(PROMPT, params)[0].outputs[0].token_ids
            == llm.generate(PROMPT, params)[0].outputs[0].token_ids
        )


# Steps that overlap


def test_steps_overlap_and_events_name_their_own(tmp_path: Path) -> None:
    def life() -> None:
        with LLM(**SMALL, async_scheduling=True) as llm:
            end = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9))[0].outputs[0].token_ids[4]
            llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[end]))

    run = read_run(record(tmp_path, life))
    steps = {(e.ph, e.step): e.seq for e in run.named("engine.step")}
    assert [step for ph, step in steps if ph == "B"] == list(range(1, 16))
    overlapping = [
        step for ph, step in steps if ph == "E" and steps.get(("B", step + 1), steps[ph, step]) < steps[ph, step]
    ]
    assert overlapping == [*range(1, 9), *range(10, 15)], (
        "step 9 is known to give the last token: none is decided with it"
    )
    tokens = [e.step for e in run.named("sched.token")]
    assert tokens == [*range(1, 10), *range(10, 15)], "the token of step 15 comes after a stop token"
    assert [(e.step, e.args["by"]) for e in run.named("sched.finished")] == [(9, "length"), (14, "stop_token")]
    spans = [(e.name, e.ph, e.step) for e in run.events if e.ph != "i" and e.step == 12]
    assert spans == [(name, ph, 12) for name, ph in (
        ("engine.step", "B"), ("executor.execute", "B"), ("model.forward", "B"), ("model.forward", "E"), ("executor.execute", "E"),
        ("engine.step", "E"))]  # fmt: skip
    check_views(run.events)


def check_views(events: list[Event]) -> None:
    """Story, busy time and Perfetto of that recording."""
    story = tell(events)
    assert [list(step.tokens.values()) for step in story.steps] == [[1]] * 14 + [[]]
    assert all(step.start_ns < step.forward_ns[0] < step.forward_ns[1] < step.end_ns for step in story.steps)
    assert [(s.kind, s.first_step, s.last_step) for r in story.requests.values() for s in r.spans if s.num_tokens] == [
        ("prefill", 1, 1), ("decode", 2, 9), ("prefill", 10, 10), ("decode", 11, 15),
    ]  # fmt: skip
    busy = StepTime()
    for step in story.steps:
        busy.feed(step)
    assert min(busy.parts.values()) >= 0 and busy.total_ns == story.steps[-1].end_ns - story.steps[0].start_ns
    file = io.BytesIO()
    PerfettoWriter(file).write(events)
    open_slices: dict[tuple[int, int], list[str]] = {}
    for row in json.loads(file.getvalue())["traceEvents"]:
        slices = open_slices.setdefault((row["pid"], row.get("tid", 0)), [])
        if row["ph"] == "B":
            assert row["name"] not in slices, "two steps lie on one track"
            slices.append(row["name"])
        elif row["ph"] == "E":
            assert slices.pop() == row["name"]
            assert "unfinished" not in row["args"]


def test_an_abort_during_a_step_drops_what_is_in_flight(core: AsyncEngineCore) -> None:
    ask(core, "kept", max_tokens=12, ignore_eos=True)
    alone = run(core)
    ask(core, "kept", max_tokens=12, ignore_eos=True)
    ask(core, "gone", [*PROMPT, 5], max_tokens=12, ignore_eos=True)
    for _ in range(3):
        core.step()
    core.abort_requests(["gone"])
    # the id is free again: the old one's token is not its own
    ask(core, "gone", [*PROMPT, 6], max_tokens=2, ignore_eos=True)
    answers = run(core)
    assert len(answers["gone"][0]) == 2 and answers["kept"][0] == alone["kept"][0][-len(answers["kept"][0]) :]
    ask(core, "new", [*PROMPT, 6], max_tokens=2, ignore_eos=True)
    assert run(core)["new"] == answers["gone"]


def test_everybody_aborted_leaves_nothing(core: AsyncEngineCore) -> None:
    for i in range(4):
        ask(core, f"r{i}", [*PROMPT, i], max_tokens=30)
    core.step()
    core.abort_requests([f"r{i}" for i in range(4)])
    assert core.has_unfinished_requests, "a step is in flight"
    assert run(core) == {}
    assert core.call("reset_prefix_cache")


def test_the_last_outputs_do_not_wait_for_a_step_that_is_dropped(core: AsyncEngineCore) -> None:
    ask(core, "a", max_tokens=8, ignore_eos=True)
    third = run(core)["a"][0][2]
    ask(core, "b", max_tokens=8, ignore_eos=True, stop_token_ids=[third])
    outputs = [core.step().outputs for _ in range(3)][-1]
    assert outputs[0].finish_reason == FinishReason.STOP and core.has_unfinished_requests
    assert run(core) == {}


def test_an_error_of_the_model_ends_the_step_that_waits_for_it() -> None:
    core = core_of()
    core.executor.execute_model = _fail
    ask(core, "a", max_tokens=4)
    with pytest.raises(RuntimeError, match="the model fails"):
        core.step()
    core.shutdown()  # the step behind it fails too, which needs no second report


def _fail(output: SchedulerOutput) -> ModelRunnerOutput:
    raise RuntimeError("the model fails")


def test_the_profiler_sees_the_thread_of_the_model(tmp_path: Path) -> None:
    import gzip

    core = core_of(profiler_dir=str(tmp_path))
    try:
        assert core.call("start_profile")
        ask(core, "a", max_tokens=3)
        run(core)
        assert core.call("stop_profile")
    finally:
        core.shutdown()
    (path,) = tmp_path.iterdir()
    names = {event["name"] for event in json.loads(gzip.open(path).read())["traceEvents"] if "name" in event}
    assert {"aten::embedding", "aten::addmm"} & names


# Settings


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config: drafts follow"),
        ({"runner": "pooling"}, "models that generate text"),
        ({"scheduler_cls": "stage03_engine.core.scheduler:Scheduler"}, "brings its own scheduler"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        EngineArgs.from_kwargs(**SMALL, async_scheduling=True, **settings)
    assert "\n" not in str(caught.value)
    EngineArgs.from_kwargs(**SMALL, async_scheduling=False, **settings)


def test_it_is_off_by_default_and_its_scheduler_says_where_it_comes_from() -> None:
    assert EngineArgs.from_kwargs(**SMALL).scheduler_config.async_scheduling is False
    config = EngineArgs.from_kwargs(**SMALL, async_scheduling=True)
    assert config.scheduler_config.scheduler_cls.endswith(":AsyncScheduler")
