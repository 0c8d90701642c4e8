"""Layers in several stages: who has what, the same tokens as in one process, steps that overlap, and what is refused.

Most of it runs the stages in this process (pipeline_in_process.py). The scheduler alone is in test_scheduler_stateful.py, replay in
test_replay.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pipeline_in_process import stages_in_this_process
from test_async_scheduling import answers_of
from test_tensor_parallel import GPT2, LLAMA, TOKENIZER, checkpoint, prompts
from toy_engine import record
from toy_runner import ToyRunner, make_request, make_scheduler, right_answer

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.unknown import unread_variables
from stage03_engine.core.engine_core_proc import make_core
from stage03_engine.core.features.distributed.pipeline_core import PipelineEngineCore
from stage03_engine.core.features.distributed.pipeline_scheduler import PipelineScheduler
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.stages import PARTITION, layer_partition, local_name, own_layers
from stage03_engine.core.features.dummy_weights.shapes import KNOWN_SHAPES
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest, FinishReason
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.check.invariants import check

SMALL: dict[str, Any] = {
    "model": "gpt2-tiny", "max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 40,
    "max_num_seqs": 6,
}  # fmt: skip
MANY: dict[str, Any] = SMALL | {"num_gpu_blocks_override": 70, "max_num_batched_tokens": 48, "max_num_seqs": 16}
PROMPT = list(range(300, 320))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

# Who has what


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"),
    [
        (12, 1, [12]), (12, 2, [6, 6]), (12, 4, [3, 3, 3, 3]), (5, 2, [3, 2]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (14, 4, [3, 4, 4, 3]),
        (15, 4, [4, 4, 4, 3]), (6, 6, [1] * 6),
    ],
)  # fmt: skip
def test_layers_are_split_evenly_and_the_last_stage_gets_none_of_the_rest(
    num_layers: int, stages: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PARTITION, raising=False)
    assert layer_partition(num_layers, stages) == expected


def test_a_variable_gives_each_stage_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARTITION, " 5, 7")
    assert layer_partition(12, 2) == [5, 7]
    assert unread_variables({PARTITION: "5,7"}, set()) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("5,x", "'5,x' is not a list of numbers of layers such as 5,7"), ("6,0", "'6,0' is not a list"), ("7,-1", "'7,-1' is not a list"),
        ("3,,3", "'3,,3' is not a list"), ("2,2,2", "is for 3 stages, but pipeline_parallel_size is 2"),
        ("3,4", "adds up to 7 layers, but the model has 6"),
    ],
)  # fmt: skip
def test_a_wrong_partition_is_one_line_before_anything_starts(
    asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARTITION, asked)
    with pytest.raises(ConfigError, match="environment variable VLLM_PP_LAYER_PARTITION: ") as caught:
        EngineArgs.from_kwargs(model="gpt2-tiny", pipeline_parallel_size=2)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    EngineArgs.from_kwargs(model="gpt2-tiny")  # without stages nobody reads it


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("transformer.h.3.attn.c_attn.weight", [None, "transformer.h.1.attn.c_attn.weight", None]),
        ("h.0.ln_1.bias", ["h.0.ln_1.bias", None, None]),
        ("model.layers.5.mlp.up_proj.weight", [None, None, "model.layers.1.mlp.up_proj.weight"]),
        ("model.layers.6.mlp.up_proj.weight", [None, None, "model.layers.2.mlp.up_proj.weight"]),
        ("wte.weight", ["wte.weight", None, "wte.weight"]),
        ("transformer.wpe.weight", ["transformer.wpe.weight", None, None]),
        ("model.embed_tokens.weight", ["model.embed_tokens.weight", None, "model.embed_tokens.weight"]),
        ("model.norm.weight", [None, None, "model.norm.weight"]),
        ("ln_f.bias", [None, None, "ln_f.bias"]),
        ("lm_head.weight", [None, None, "lm_head.weight"]),
        ("surprise.weight", ["surprise.weight"] * 3),
    ],
)
def test_each_tensor_goes_to_its_stage_under_its_name_there(name: str, whose: list[str | None]) -> None:
    """Six layers in three stages; weights are tied, so the last stage has the embedding too. A seventh layer is refused there."""
    shape = replace(KNOWN_SHAPES["gpt2"], num_layers=6)
    assert [local_name(name, shape, Ranks(rank, 1, 3)) for rank in range(3)] == whose
    assert [local_name(name, shape, Ranks(rank, 2, 3)) for rank in range(6)] == [each for each in whose for _ in "ab"]
    untied = replace(shape, tie_word_embeddings=False)
    expected = [whose[0], None, None] if name in ("wte.weight", "model.embed_tokens.weight") else whose
    assert [local_name(name, untied, Ranks(rank, 1, 3)) for rank in range(3)] == expected


def test_settings_of_single_layers_follow_them() -> None:
    shape = replace(KNOWN_SHAPES["gpt2"], num_layers=7, sliding_window=9, sliding_layers=(0, 2, 4, 6))
    mine = [own_layers(shape, Ranks(rank, 1, 3)) for rank in range(3)]
    assert [(own.num_layers, own.sliding_layers) for own in mine] == [(2, (0,)), (3, (0, 2)), (2, (1,))]


# The same tokens


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, own output matrix": GPT2 | {"tie_word_embeddings": False},
    "gpt2, scaled by layer": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "gpt2, scaled by layer alone": GPT2 | {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    "llama": LLAMA,
    "llama, tied": LLAMA | {"tie_word_embeddings": True},
    "qwen2, some layers sliding": LLAMA | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7,
        "max_window_layers": 1,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    """Stages that a test makes in this process stay connected until it ends."""
    with stages_in_this_process():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Of one request alone, so that every product has the same rows; with two stages and with one between them."""
    model = checkpoint(tmp_path / "model", MODELS[name])
    settings = {"model": model, "tokenizer": TOKENIZER, "max_model_len": 64, "max_num_batched_tokens": 9}
    params = SamplingParams(temperature=1, seed=1, max_tokens=20, logprobs=4, ignore_eos=True)
    tokens = [(7 * i) % 97 for i in range(23)]
    found = []
    for stages in (1, 2, 3):
        with LLM(**SMALL | settings, pipeline_parallel_size=stages) as llm:
            output = llm.generate(tokens, params)[0].outputs[0]
            found.append((output.token_ids, output.logprobs))
    assert found[1] == found[0] and found[2] == found[0]
    assert found[0][1][1] != found[0][1][0], "the test is void if all positions are alike"


@pytest.mark.slow(keep="2, fair")
@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 3, "scheduling_policy": "priority"},
        {"pipeline_parallel_size": 2, "scheduling_policy": "fair", "preemption_mode": "swap", "swap_space": 0.01},
    ],
    ids=lambda settings: ", ".join(map(str, settings.values())),
)
def test_every_kind_of_request_gets_the_same_answer(settings: dict[str, Any]) -> None:
    """Seeds, logprobs, penalties, stop strings, a grammar, prompt logprobs, several answers, over a cache that is too small."""
    both = []
    for own in (settings | {"pipeline_parallel_size": 1}, settings):
        with LLM(**SMALL | own) as llm:
            both.append(answers_of(llm))
            assert llm.engine_core._core.scheduler.stats.num_preemptions > 0, "void: blocks were never scarce"  # type: ignore[attr-defined]
    assert both[0] == both[1]


@pytest.mark.slow(keep="{}")
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"enable_prefix_caching": False}, {"load_format": "dummy", "seed": 3}, {"linear_backend": "torch", "attention_backend": "torch"},
        {"quantization": "int8"}, {"check_invariants": True, "preemption_mode": "swap", "swap_space": 0.01}, {"trace_layers": True},
    ],
    ids=str,
)  # fmt: skip
def test_64_prompts_give_the_same_tokens(settings: dict[str, Any]) -> None:
    """With chunks, a prefix cache and preemptions."""
    answers = []
    for stages in (1, 2):
        with LLM(**MANY | settings, pipeline_parallel_size=stages) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY)])
            stats = llm.engine_core._core.scheduler.stats  # type: ignore[attr-defined]
            assert stats.num_preemptions > 0, "the test is void if nothing was preempted"
            assert stats.prefix_cache_hits > 0 or "enable_prefix_caching" in settings
    assert answers[0] == answers[1]


def test_a_partition_of_ones_own_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**SMALL) as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    monkeypatch.setenv(PARTITION, "1,5")
    with LLM(**SMALL, pipeline_parallel_size=2) as llm:
        assert [len(worker.model_runner.kv_caches) for worker in llm.engine_core._core.executor.workers] == [1, 5]  # type: ignore[attr-defined]
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected


# Steps that overlap


def test_stages_take_turns_with_groups_of_one_size(tmp_path: Path) -> None:
    """Eight prompts in one step; from then on two groups of four, one of which is decided before the other has come back."""

    def life() -> None:
        with LLM(**SMALL | {"max_num_seqs": 8, "num_gpu_blocks_override": 90}, pipeline_parallel_size=2) as llm:
            llm.generate([[*PROMPT[:4], i] for i in range(8)], GREEDY)

    events = read_run(record(tmp_path, life)).events
    spans = [(e.ph, e.step) for e in events if e.name == "engine.step"]
    sizes: dict[int, int] = {}
    for event in events:
        if event.name == "sched.scheduled":
            sizes[event.step or 0] = sizes.get(event.step or 0, 0) + 1
    assert list(sizes.values()) == [8] + [4] * 18, "the first step gives eight tokens, the others 72"
    overlapping = [step for step in range(2, 19) if spans.index(("B", step + 1)) < spans.index(("E", step))]
    assert overlapping == list(range(2, 19))
    assert check(tmp_path).deaths == []
    (result,) = replay(tmp_path)
    assert result.difference is None and result.steps == 19


def test_groups_can_be_left_as_they_come(tmp_path: Path) -> None:
    """Then requests that are admitted together stay together, and no step overlaps another."""

    def life() -> None:
        settings = {"max_num_seqs": 8, "num_gpu_blocks_override": 90, "pipeline_groups": False}
        with LLM(**SMALL | settings, pipeline_parallel_size=2) as llm:
            llm.generate([[*PROMPT[:4], i] for i in range(8)], GREEDY)

    spans = [(e.ph, e.step) for e in read_run(record(tmp_path, life)).named("engine.step")]
    assert spans == [(ph, step) for step in range(1, 11) for ph in "BE"]
    (result,) = replay(tmp_path)
    assert result.difference is None


def test_chunks_of_a_prompt_follow_each_other_into_the_pipeline(tmp_path: Path) -> None:
    def life() -> None:
        with LLM(**SMALL | {"max_num_batched_tokens": 8}, pipeline_parallel_size=3) as llm:
            llm.generate(list(range(300, 340)), GREEDY)

    events = read_run(record(tmp_path, life)).events
    spans = [(e.ph, e.step) for e in events if e.name == "engine.step"]
    assert "".join(f"{ph}{step}" for ph, step in spans[:10]) == "B1B2B3E1B4E2B5E3E4E5"
    assert spans[10:] == [(ph, step) for step in range(6, 15) for ph in "BE"], "a token needs the one before"


def core_of(**settings: Any) -> PipelineEngineCore:
    core = make_core(EngineArgs.from_kwargs(**SMALL | {"pipeline_parallel_size": 2} | settings))
    assert isinstance(core, PipelineEngineCore)
    return core


def ask(core: PipelineEngineCore, name: str, prompt: list[int], **params: Any) -> None:
    params = {"temperature": 0, "ignore_eos": True} | params
    core.add_request(EngineCoreRequest(name, prompt, SamplingParams(**params), eos_token_id=None))


def finish(core: PipelineEngineCore) -> dict[str, list[int]]:
    """Step until nothing is left, not even in flight: what each request received."""
    answers: dict[str, list[int]] = {}
    while core.has_unfinished_requests:
        for output in core.step().outputs:
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_usable
    return answers


@pytest.fixture(scope="module")
def core() -> Iterator[PipelineEngineCore]:
    with stages_in_this_process():
        core = core_of()
        yield core
        core.shutdown()


def test_an_abort_drops_what_is_in_flight(core: PipelineEngineCore) -> None:
    other = [*PROMPT, 6]
    ask(core, "alone", PROMPT, max_tokens=12)
    ask(core, "new", other, max_tokens=3)
    alone = finish(core)
    ask(core, "kept", PROMPT, max_tokens=12)
    ask(core, "gone", [*PROMPT, 5], max_tokens=12)
    early = [output for _ in range(4) for output in core.step().outputs if output.request_id == "kept"]
    kept = [token for output in early for token in output.new_token_ids]
    core.abort_requests(["gone"])
    ask(core, "gone", other, max_tokens=3)  # the id is free again: the old one's token is not its own
    answers = finish(core)
    assert answers["gone"] == alone["new"] and kept + answers["kept"] == alone["alone"]


def test_everybody_aborted_leaves_nothing(core: PipelineEngineCore) -> None:
    for i in range(4):
        ask(core, f"r{i}", [*PROMPT, i], max_tokens=30)
    core.step()
    core.abort_requests([f"r{i}" for i in range(4)])
    finish(core)
    assert core.call("reset_prefix_cache")


def test_a_preempted_request_in_flight_samples_the_same_token_again() -> None:
    """A cache for two requests and a half: the last one loses its blocks again and again, also while its token is in flight."""
    asked = {f"r{i}": [*PROMPT[:6], i] for i in range(4)}
    with_room = core_of(num_gpu_blocks_override=90)
    for name, prompt in asked.items():
        ask(with_room, name, prompt, max_tokens=40, seed=4, temperature=0.8)
    expected = finish(with_room)
    with_room.shutdown()
    for settings in ({}, {"preemption_mode": "swap", "swap_space": 0.01}, {"pipeline_parallel_size": 3}):
        core, dropped = core_of(num_gpu_blocks_override=30, **settings), []
        update = core.scheduler.update_from_output

        def spy(output: Any, ran: ModelRunnerOutput, update: Any = update, dropped: list[str] = dropped) -> Any:
            before = set(ran.sampled_token_ids)
            outputs = update(output, ran)
            dropped += before - set(ran.sampled_token_ids)
            return outputs

        core.scheduler.update_from_output = spy  # type: ignore[method-assign]
        for name, prompt in asked.items():
            ask(core, name, prompt, max_tokens=40, seed=4, temperature=0.8)
        assert finish(core) == expected
        assert dropped, "void: nobody was preempted in flight"
        core.shutdown()


def test_a_request_that_resumes_while_its_token_is_in_flight_gets_it_once() -> None:
    """`v` loses its blocks to `a`, and gets those of `b`, which ends, before its own step has come back."""
    scheduler = make_scheduler(6, 64, 7, kind=PipelineScheduler, pipeline_stages=3)
    runner, in_flight, resumed = ToyRunner(scheduler), deque[SchedulerOutput](), []
    expected, found = {}, dict[str, list[int]]()
    for name, length, count in (("a", 7, 6), ("b", 5, 2), ("v", 5, 6)):
        prompt, params = list(range(60, 60 + length)), SamplingParams(max_tokens=count, ignore_eos=True)
        expected[name], found[name] = right_answer(prompt, params)[0], []
        scheduler.add_request(make_request(name, prompt, params))
    while scheduler.requests or in_flight:
        while len(in_flight) < 3 and scheduler.can_schedule():
            output = msgspec.msgpack.decode(msgspec.msgpack.encode(scheduler.schedule()), type=SchedulerOutput)
            resumed += [
                new
                for new in output.scheduled_new_reqs
                for step in in_flight
                if new.request_id in step.num_scheduled_tokens
            ]
            in_flight.append(output)
        oldest = in_flight.popleft()
        for new in scheduler.update_from_output(oldest, runner.execute(oldest)):
            found[new.request_id] += new.new_token_ids
    assert resumed, "the test is void if nobody resumes in flight"
    assert found == expected


def test_an_error_of_the_workers_ends_the_step_that_waits_for_it() -> None:
    core = core_of()

    def fail() -> ModelRunnerOutput:
        raise RuntimeError("a worker fails")

    core.executor.finish_step = fail  # type: ignore[attr-defined]
    ask(core, "a", PROMPT, max_tokens=4)
    with pytest.raises(RuntimeError, match="a worker fails"):
        core.step()
    core.shutdown()


def test_a_stop_token_ends_a_request_in_its_own_step(core: PipelineEngineCore) -> None:
    ask(core, "a", PROMPT, max_tokens=8)
    third = finish(core)["a"][2]
    ask(core, "b", PROMPT, max_tokens=8, stop_token_ids=[third])
    outputs = [core.step().outputs for _ in range(3)][-1]
    assert outputs[0].finish_reason == FinishReason.STOP and not core.has_unfinished_requests


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel_size": 7}, "pipeline_parallel_size = 7 is more than the model's 6 layers"),
        ({"async_scheduling": True}, "async_scheduling: the steps of several stages overlap already"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config: .* only the last stage would know which"),
        ({"runner": "pooling"}, "because the last stage answers with tokens alone"),
        ({"scheduler_cls": "stage03_engine.core.scheduler:Scheduler"}, "brings its own scheduler, which knows what is in flight"),
        ({"batch_invariant": True}, "batch_invariant: each stage would choose its own number of rows"),
        ({"distributed_executor_backend": "uni"}, "uni is one worker"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        EngineArgs.from_kwargs(**SMALL | {"pipeline_parallel_size": 2} | settings)
    assert "\n" not in str(caught.value)


def test_one_stage_changes_nothing() -> None:
    config = EngineArgs.from_kwargs(**SMALL, pipeline_parallel_size=1)
    assert config.scheduler_config.scheduler_cls is None and config.scheduler_config.pipeline_stages == 1
    assert not config.hooks("core") and not config.hooks("executor")
