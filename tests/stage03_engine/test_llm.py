"""`LLM` and `python -m stage03_engine generate`: the engine without HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from stage03_engine.__main__ import main
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import read_run, trace

SMALL = {"kv_cache_memory_bytes": 50_000_000}


def test_unseeded_requests_differ_from_each_other_and_repeat_with_the_engines_seed() -> None:
    def sample(seed: int) -> list[str]:
        with LLM("gpt2-tiny", seed=seed, **SMALL) as llm:
            outputs = llm.generate(["ROMEO:"] * 3, SamplingParams(max_tokens=12))
            return [output.outputs[0].text for output in outputs]

    first = sample(0)
    assert len(set(first)) == 3
    assert sample(0) == first != sample(1)


def test_results_come_in_the_order_of_the_prompts_each_with_its_own_settings() -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5)]
    with LLM("gpt2-tiny", **SMALL) as llm:
        outputs = llm.generate(["ROMEO:", [5, 6, 7], "K"], params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
        assert [output.prompt for output in outputs] == ["ROMEO:", None, "K"]
        assert outputs[1].prompt_token_ids == [5, 6, 7]
        assert llm.generate([]) == []
        with pytest.raises(InvalidRequestError, match="2 prompts but 3"):
            llm.generate(["a", "b"], params)


def test_an_impossible_prompt_leaves_the_engine_clean() -> None:
    with LLM("gpt2-tiny", **SMALL) as llm:
        with pytest.raises(InvalidRequestError):
            llm.generate(["fine", ""])
        stream = llm.stream("ROMEO:", SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        stream.close()
        assert not llm.output_processor.request_states
        assert not llm.engine_core._core.scheduler.has_unfinished_requests
        assert llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=2))[0].finished


def test_stop_token_ids_and_ignore_eos() -> None:
    with LLM("gpt2-tiny", **SMALL) as llm:
        plain = llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=10))[0].outputs[0]
        third = plain.token_ids[2]
        stopped = llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[third]))[0]
        completion = stopped.outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", third)
        assert completion.token_ids == plain.token_ids[:3]
        assert completion.text == llm.tokenizer.decode(plain.token_ids[:2]), "a stop token is not part of the text"
        params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[third], include_stop_str_in_output=True)
        kept = llm.generate("To be, or", params)[0].outputs[0]
        assert kept.text == llm.tokenizer.decode(plain.token_ids[:3])


def test_what_waits_for_a_stop_string_comes_out_at_the_end() -> None:
    """The output ends with the beginning of a stop string that never completes."""
    with LLM("gpt2-tiny", **SMALL) as llm:
        plain = llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
        never = plain[-3:] + "never"
        assert (
            llm.generate("To be, or", SamplingParams(temperature=0, max_tokens=5, stop=[never]))[0].outputs[0].text
            == plain
        )


def test_unknown_settings_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        LLM("gpt2-tiny", blocksize=8)


PLUGIN = """
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.scheduler import Scheduler

class OneAtATime(Scheduler):
    def _schedule_waiting(self, output, budget):
        if not self.running:
            self.config = type(self.config)(**{**vars(self.config), "max_num_seqs": 1})
            super()._schedule_waiting(output, budget)

class Small(BlockPool):
    def __init__(self, num_blocks):
        super().__init__(6)

class Backwards(BlockPool):
    def allocate(self, count):
        return super().allocate(count)[::-1]
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a user's classes, importable here and in an engine process."""
    (tmp_path / "users_own.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    return "users_own"


@pytest.mark.slow(keep="False")
@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_users_own_scheduler_and_block_pool_run(multiprocess: bool, plugin: str) -> None:
    own = {"scheduler_cls": f"{plugin}:OneAtATime", "block_pool_cls": f"{plugin}:Backwards"}
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM("gpt2-tiny", **SMALL) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(["ROMEO:", "K"], params)]
    with LLM("gpt2-tiny", multiprocess=multiprocess, **SMALL, **own) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(["ROMEO:", "K"], params)] == expected
        if not multiprocess:
            assert llm.engine_core._core.scheduler.step > 6, "the requests ran side by side"


@pytest.mark.parametrize("multiprocess", [False, True])
def test_what_could_never_run_is_refused_at_arrival_with_the_numbers(multiprocess: bool, plugin: str) -> None:
    """Five usable blocks of 16 tokens: a request that may grow to 100 tokens would wait for ever."""
    with LLM("gpt2-tiny", multiprocess=multiprocess, block_pool_cls=f"{plugin}:Small", **SMALL) as llm:
        with pytest.raises(InvalidRequestError, match="100 tokens, which take 7 KV-cache blocks, but there are only 5"):
            llm.generate(["fine", [5] * 60], [SamplingParams(max_tokens=4), SamplingParams(max_tokens=40)])
        assert not llm.output_processor.request_states
        assert llm.generate([5] * 60, SamplingParams(max_tokens=20, ignore_eos=True))[0].finished


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"scheduler_cls": "no_such_module:Class"}, "--scheduler-cls no_such_module:Class"),
        ({"block_pool_cls": "stage03_engine.core.block_pool:Nothing"}, "--block-pool-cls"),
        ({"scheduler_cls": "just_a_word"}, "module:Class"),
        ({"block_pool_cls": "builtins:dict"}, "--block-pool-cls builtins:dict: TypeError"),
        ({"scheduler_cls": "builtins:dict"}, "--scheduler-cls builtins:dict: TypeError"),
        ({"block_pool_cls": "os:path"}, "--block-pool-cls os:path: this is not a class"),
        ({"preemption_mode": "swap", "swap_space": 1e9}, "not enough memory for .* lower .*--swap-space"),
        ({"preemption_mode": "swap", "swap_space": 1e30}, "not enough memory"),
        ({"kv_cache_memory_bytes": 10**17}, "not enough memory for .* lower --kv-cache-memory-bytes"),
        ({"long_prefill_token_threshold": 5, "enable_chunked_prefill": False}, "long_prefill_token_threshold"),
    ],
)
def test_a_scheduler_setting_that_cannot_work_is_refused(setting: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("gpt2-tiny", **SMALL | setting)


@pytest.mark.slow(keep="False")
@pytest.mark.parametrize("multiprocess", [False, True])
def test_prefix_caching_reuses_and_resets(multiprocess: bool) -> None:
    params, prompt = SamplingParams(temperature=0, max_tokens=4), [9] * 40
    with LLM("gpt2-tiny", multiprocess=multiprocess, **SMALL) as llm:
        first, second = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        assert llm.call("reset_prefix_cache")
        assert llm.generate(prompt, params)[0].num_cached_tokens == 0


def test_prefix_caching_can_be_switched_off() -> None:
    params, prompt = SamplingParams(temperature=0, max_tokens=4), [9] * 40
    with LLM("gpt2-tiny", enable_prefix_caching=False, **SMALL) as llm:
        assert [llm.generate(prompt, params)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_the_trace_shows_hits_evictions_preemption_and_swapping(tmp_path: Path) -> None:
    """A cache for little more than one request, eight requests, and the trace of what happens to their blocks."""
    trace.hold("LLM")
    trace.open(str(tmp_path))
    try:
        tight = {"max_model_len": 96, "num_gpu_blocks_override": 10, "preemption_mode": "swap", "swap_space": 0.01}
        with LLM("gpt2-tiny", **tight) as llm:
            prompts = [[i // 2] * 40 for i in range(2, 10)]
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    finally:
        trace.close()
    run = read_run(tmp_path)
    for name in ("sched.prefix_hit", "kv.cached", "kv.evicted", "sched.preempt", "sched.resume", "kv.swapped"):
        assert run.named(name), name
    assert (
        sum(e.args["num_out"] for e in run.named("kv.swapped"))
        >= sum(e.args["num_in"] for e in run.named("kv.swapped"))
        > 0
    )


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage03_engine", "generate", *args], capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.slow(keep="in-process")
@pytest.mark.parametrize("where", [[], ["--multiprocess"]], ids=["in-process", "multiprocess"])
def test_the_command_prints_the_completion_and_leaves_a_trace(where: list[str], tmp_path: Path) -> None:
    flags = ["--max-tokens", "8", "--kv-cache-memory-bytes", "50000000", "--trace", str(tmp_path), *where]
    result = command("gpt2-tiny", "To be, or", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("To be, or I'll be so,") and result.stderr == ""
    run = read_run(tmp_path)
    assert len(run.named("sched.token")) == 8
    assert {e.proc for e in run.events} == {"LLM", *(["EngineCore_DP0"] if where else [])}


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["gpt2-tiny", ""], "empty"),
        (["gpt2-tiny", "a", "--temperature", "3"], "temperature"),
        (["gpt2-tiny", "a", "--max-tokens", "0"], "max_tokens"),
        (["gpt2-tiny", "a", "--num-gpu-blocks-override", "3"], "--max-model-len"),
        (["gpt2-tiny", "a", "--num-gpu-blocks-override", "3", "--multiprocess"], "--max-model-len"),
        (["gpt2-tiny"], "PROMPT"),
    ],
)
def test_what_is_impossible_ends_in_one_line(
    args: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what the command prints is the same, and torch is there already."""
    monkeypatch.setattr(sys, "argv", ["stages", "generate", *args])
    try:
        code = main()
    finally:
        trace.close()  # a process that ends need not; this one goes on
    out, err = capsys.readouterr()
    assert code in (1, 2) and out == ""
    [line] = err.splitlines()
    assert line.startswith("stages: error: ") and word in line


def test_a_trace_is_recorded_until_shutdown_and_not_kept_by_an_engine_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        LLM("gpt2-tiny", trace=str(tmp_path / "failed"), num_gpu_blocks_override=3)
    assert not trace.on
    with LLM("gpt2-tiny", trace=str(tmp_path / "run"), **SMALL) as llm:
        llm.generate("ROMEO:", SamplingParams(max_tokens=3, ignore_eos=True))
    assert not trace.on and len(read_run(tmp_path / "run").named("sched.token")) == 3


def test_every_answer_comes_back_whatever_the_output_kind() -> None:
    with LLM("gpt2-tiny", **SMALL) as llm:
        for kind in RequestOutputKind:
            for output in llm.generate(["a", "b"], SamplingParams(n=3, max_tokens=5, output_kind=kind)):
                assert output.finished and [answer.index for answer in output.outputs] == [0, 1, 2]
                assert all(answer.finish_reason and answer.token_ids for answer in output.outputs)
