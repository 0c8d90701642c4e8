"""Replay: what the scheduler decided is decided again, exactly, whatever happened; and whoever decides otherwise is found out
in the first step in which he does."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from toy_engine import STEM, AsyncToyEngine, PipelineToyEngine, ToyEngine, random_life, record

from stage01_cli.main import main
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.llm import LLM
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.replay.replay import Replayed, replay
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import read_run, trace
from stagetrace.check.difference import compare
from stagetrace.check.invariants import check
from stagetrace.check.reasons import explain
from stagetrace.errors import TraceError

RECORDED = sorted(path for path in (Path(__file__).parents[2] / "trace" / "recorded").iterdir() if path.is_dir())
HERE = __name__


def replayed(directory: Path, **classes: str) -> Replayed:
    (result,) = replay(directory, **classes)
    return result


def assert_exact(directory: Path) -> Replayed:
    result = replayed(directory)
    assert result.difference is None, str(result)
    events = read_run(directory).events
    decided = [e for e in events if e.name == "sched.output"]
    assert result.steps == len(decided) and result.tokens == sum(e.args["total_tokens"] for e in decided)
    assert result.requests == sum(e.name == "sched.queued" for e in events)
    return result


def assert_consistent(directory: Path) -> None:
    """A test is one process with many recordings, and the numbers of its events go on: they begin late."""
    report = check(directory)
    findings = [str(finding) for finding in report.findings if "event 1 to " not in finding.text]
    assert report.deaths + findings == []


settings_of_engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(26, 60), "block_size": st.sampled_from([4, 8, 16]), "caching": st.booleans(),
        "swap_blocks": st.sampled_from([0, 0, 4, 60]), "num_drafts": st.sampled_from([0, 4]),
        "max_num_seqs": st.integers(1, 8), "max_num_batched_tokens": st.sampled_from([8, 20, 64]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "fair"]), "long_prefill_token_threshold": st.sampled_from([0, 5]),
    }
)  # fmt: skip


CUT_OFF = {
    "num_blocks": 26, "block_size": 4, "caching": False, "swap_blocks": 4, "num_drafts": 0, "max_num_seqs": 3,
    "max_num_batched_tokens": 8, "scheduling_policy": "fcfs", "long_prefill_token_threshold": 0,
}  # fmt: skip
"""Ends while a step that swaps is in flight: what it swaps is recorded when it runs."""


@given(st.integers(0, 10**6), settings_of_engines, st.integers(1, 14))
def test_every_life_of_a_scheduler_is_reproduced(seed: int, engine: dict[str, Any], num_requests: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), lambda: random_life(ToyEngine(seed, **engine), num_requests))
        assert_exact(Path(folder))


@pytest.mark.parametrize("kind", [AsyncToyEngine, PipelineToyEngine])
@given(seed=st.integers(0, 10**6), engine=settings_of_engines, num_requests=st.integers(1, 14))
@example(seed=0, engine=CUT_OFF, num_requests=5)
def test_every_life_with_steps_that_overlap_is_reproduced(
    kind: type[ToyEngine], seed: int, engine: dict[str, Any], num_requests: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), lambda: random_life(kind(seed, **engine | {"num_drafts": 0}), num_requests))
        assert_exact(Path(folder))
        assert_consistent(Path(folder))
        assert compare(folder, folder).same
        tokens = {(e.req, e.step) for e in read_run(folder).named("sched.token")}
        for end in read_run(folder).named("sched.finished"):
            if end.args["by"] not in ("outside", "grammar"):
                assert (end.req, end.step) in tokens, "it ended in a step that gave it no token"
            reasons = [reason.rule for step in explain(folder, end.req) for reason in step.reasons]
            assert sum(rule.startswith("end ") for rule in reasons) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_a_preemption_storm_is_reproduced(chunked: bool, tmp_path: Path) -> None:
    def storm() -> None:
        engine = ToyEngine(3, num_blocks=26, max_num_batched_tokens=96, enable_chunked_prefill=chunked)
        for i in range(30):
            engine.add(f"r{i}", [*STEM[:5], i], max_tokens=40, ignore_eos=True)
        engine.run()

    assert_exact(record(tmp_path, storm))
    assert len(read_run(tmp_path).named("sched.preempt")) > 30


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: path.name)
def test_the_recorded_runs_are_reproduced_and_those_with_a_planted_bug_are_not(folder: Path) -> None:
    planted = folder.name.startswith("bug_") and not folder.name.endswith("_healthy")
    assert {result.difference is not None for result in replay(folder)} == {planted}


KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "prompt logprobs": SamplingParams(seed=1, max_tokens=20, prompt_logprobs=1),
    "three answers": SamplingParams(seed=1, max_tokens=20, n=3, output_kind=RequestOutputKind.FINAL_ONLY),
    "stop string": SamplingParams(temperature=0, max_tokens=30, stop=["my lord"]),
    "stop token": SamplingParams(seed=3, max_tokens=30, stop_token_ids=list(range(200, 600))),
    "regex": SamplingParams(seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="(yes|no){3,6}!")),
    "choice": SamplingParams(
        seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["alpha", "beta"])
    ),
}
PROMPTS = {kind: "KING RICHARD:\nMy lord, my lord, my lord, " + kind for kind in KINDS}
BUSY: dict[str, Any] = {
    "max_model_len": 96, "num_gpu_blocks_override": 27, "block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 12,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}  # fmt: skip


@pytest.mark.slow(keep=("swap-False", "recompute-True"))
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_real_engine_with_everything_at_once_is_reproduced(mode: str, ahead: bool, tmp_path: Path) -> None:
    """`ahead`: with asynchronous scheduling, and so without drafts."""
    settings = BUSY | ({"async_scheduling": True, "speculative_config": None} if ahead else {})

    def life() -> None:
        with LLM("gpt2-tiny", preemption_mode=mode, swap_space=0.01, **settings) as llm:
            for _ in range(2):  # the second time over a warm prefix cache
                llm.generate([PROMPTS[kind] for kind in KINDS], list(KINDS.values()))
            llm.call("reset_prefix_cache")
            llm.generate(list(PROMPTS.values())[:3], SamplingParams(temperature=0, max_tokens=8))

    assert_exact(record(tmp_path, life))
    run = read_run(tmp_path)
    seen = {e.name for e in run.events}
    assert {"sched.preempt", "sched.prefix_hit", "grammar.ready", "kv.reset"} <= seen
    assert ("spec.verified" in seen) != ahead and ("kv.swapped" in seen) == (mode == "swap")
    if ahead:
        assert_consistent(tmp_path)
    assert {"eos", "stop_token", "length", "grammar", "outside"} - {"eos"} <= {
        e.args["by"] for e in run.named("sched.finished")
    }


# Somebody else's scheduler


class Silent(Scheduler):
    """Decides the same; a replay asks it for decisions, not for events."""

    def schedule(self) -> SchedulerOutput:
        return super().schedule()


class Greedy(Scheduler):
    """Forgets the limit of the batch."""

    def schedule(self) -> SchedulerOutput:
        object.__setattr__(self.config, "max_num_seqs", 1000)
        return super().schedule()


class PreemptsTheFirst(Scheduler):
    def _allocate_or_preempt(self, request: Request, num_tokens: int, output: SchedulerOutput) -> list[int] | None:
        pop = self.running.pop
        self.running.pop = lambda: pop(0)  # type: ignore[method-assign, assignment, misc]
        try:
            return super()._allocate_or_preempt(request, num_tokens, output)
        finally:
            self.running.pop = pop  # type: ignore[method-assign]


class LastInFirstOut(Scheduler):
    def schedule(self) -> SchedulerOutput:
        self.waiting.reverse()
        try:
            return super().schedule()
        finally:
            self.waiting.sort(key=self.waiting._key)


class ForgetsToFree(Scheduler):
    def _finish(self, request: Request, *args: Any, **more: Any) -> None:
        table = copy.copy(self.kv_cache_manager.tables.get(request.request_id, []))
        super()._finish(request, *args, **more)
        self.kv_cache_manager.block_pool.touch(table[-1:])


class NeverHits(Scheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kv_cache_manager.get_computed_blocks = lambda request: []  # type: ignore[method-assign]


class Raises(Scheduler):
    def schedule(self) -> SchedulerOutput:
        if self.step == 2:
            raise RuntimeError("no idea")
        return super().schedule()


class NewestFirst(BlockPool):
    """Hands out other blocks, as many of them."""

    def allocate(self, count: int) -> list[int]:
        return super().allocate(count)[::-1]


def life_of_twelve() -> None:
    engine = ToyEngine(1, num_blocks=26, max_num_seqs=4, max_num_batched_tokens=32)
    for i in range(12):
        engine.add(f"r{i}", [*STEM[:9], i], max_tokens=30, ignore_eos=True)
    engine.run()


def first_event(directory: Path, matches: Callable[[Any], bool]) -> int:
    return next(e.step for e in read_run(directory).events if matches(e) and e.step is not None)


def test_the_same_scheduler_under_another_name_is_the_same(tmp_path: Path) -> None:
    assert replayed(record(tmp_path, life_of_twelve), scheduler_cls=f"{HERE}:Silent").difference is None


@pytest.mark.parametrize(
    ("planted", "where", "words"),
    [
        ("Greedy", lambda e: e.name == "sched.held_back" and e.args["rule"] == "max_num_seqs", "admitted"),
        ("PreemptsTheFirst", lambda e: e.name == "sched.preempt", "preempted"),
        ("LastInFirstOut", lambda e: e.name == "sched.admit", "r11"),
        ("NeverHits", lambda e: e.name == "sched.prefix_hit", "new blocks"),
        ("Raises", lambda e: e.step == 3, "no idea"),
    ],
)
def test_another_policy_is_caught_in_the_first_step_that_differs(
    planted: str, where: Callable[[Any], bool], words: str, tmp_path: Path
) -> None:
    record(tmp_path, life_of_twelve)
    difference = replayed(tmp_path, scheduler_cls=f"{HERE}:{planted}").difference
    assert difference is not None and difference.step == first_event(tmp_path, where)
    assert words in str(difference) and "blocks free; budget 32 tokens" in difference.before[0]


def test_a_block_that_is_never_freed_is_noticed_when_its_request_ends(tmp_path: Path) -> None:
    record(tmp_path, life_of_twelve)
    difference = replayed(tmp_path, scheduler_cls=f"{HERE}:ForgetsToFree").difference
    first_end = first_event(tmp_path, lambda e: e.name == "sched.finished")
    assert difference is not None and difference.step == first_end + 1 and "free blocks" in str(difference)


def test_another_block_pool_is_compared_block_by_block(tmp_path: Path) -> None:
    record(tmp_path, life_of_twelve)
    difference = replayed(tmp_path, block_pool_cls=f"{HERE}:NewestFirst").difference
    assert difference is not None and (difference.step, difference.request_id) == (1, "r0")
    assert "new blocks [1, 2, 3]" in difference.recorded[0] and "new blocks [3, 2, 1]" in difference.replayed[0]


# Recordings that were changed, or are not whole


def lines_of(directory: Path) -> tuple[Path, list[dict[str, Any]]]:
    (path,) = directory.glob("*.jsonl")
    return path, [json.loads(line) for line in path.read_text().splitlines()]


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a block": ("sched.scheduled", lambda e: e["args"]["new_blocks"].append(1)),
    "a number of tokens": ("sched.scheduled", lambda e: e["args"].update(num_tokens=e["args"]["num_tokens"] + 1)),
    "a victim": ("sched.preempt", lambda e: e.update(req="r0")),
    "free blocks": ("sched.output", lambda e: e["args"].update(free_blocks=e["args"]["free_blocks"] - 1)),
    "an end": ("sched.finished", lambda e: e["args"].update(reason="abort")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_recording_is_found_out_at_the_change(what: str, tmp_path: Path) -> None:
    path, lines = lines_of(record(tmp_path, life_of_twelve))
    name, change = CHANGES[what]
    line = [line for line in lines if line["name"] == name][-1]
    change(line)
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    difference = replayed(tmp_path).difference
    assert difference is not None and difference.step == line["step"]


@settings(max_examples=settings().max_examples // 2)
@given(st.data())
def test_a_recording_that_lacks_a_line_is_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, lines = lines_of(record(Path(folder), life_of_twelve))
        first = next(i for i, line in enumerate(lines) if line["name"] == "scheduler.created")
        del lines[data.draw(st.integers(first, len(lines) - 2))]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        with pytest.raises(TraceError, match=r"lacks events|does not begin"):
            replay(folder)


@settings(max_examples=settings().max_examples // 2)
@given(st.data())
def test_a_recording_that_was_cut_off_is_reproduced_up_to_there(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, lines = lines_of(record(Path(folder), life_of_twelve))
        first = next(i for i, line in enumerate(lines) if line["name"] == "scheduler.created")
        lines = lines[: data.draw(st.integers(first + 1, len(lines)))]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        result = replayed(Path(folder))
        steps = [line for line in lines if line["name"] == "engine.step"]
        assert result.difference is None and result.steps == sum(line["ph"] == "E" for line in steps)
        assert result.cut_off == (steps[-1]["step"] if steps and steps[-1]["ph"] == "B" else None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(record(tmp_path / "run", life_of_twelve))
    assert main(["trace", "replay", recording]) == 0
    assert "every decision is the same" in capsys.readouterr().out
    assert main(["trace", "replay", recording, "--scheduler-cls", f"{HERE}:LastInFirstOut"]) == 1
    out = capsys.readouterr().out
    assert "step 1: the first decision that differs" in out and "recorded: r0 admitted" in out and "replayed: r0" in out
    for words in (
        ["nowhere"],
        [recording, "--scheduler-cls", "no.such:Thing"],
        [recording, "--scheduler-cls", "nothing"],
    ):
        assert main(["trace", "replay", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "Traceback" not in error
    trace.hold("LLM")
    trace.open(str(tmp_path / "nothing"))
    trace.close()
    assert main(["trace", "replay", str(tmp_path / "nothing")]) == 2
    assert "no engine's scheduler" in capsys.readouterr().err


def test_a_filtered_recording_is_refused(tmp_path: Path) -> None:
    path, lines = lines_of(record(tmp_path, life_of_twelve))
    lines[0]["args"]["filter"] = {"phases": [8]}
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(TraceError, match="without filters"):
        replay(tmp_path)


def test_no_torch_is_needed() -> None:
    code = "import sys, stage03_engine.replay.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
