"""Steps replayed in pieces and whole, under CUDA graphs' rules on a CPU: the tokens are those of a step that runs, and a mistake that a GPU would pass over turns red."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import msgspec
import pytest
import torch
from drafting import small_llama
from safetensors.torch import load_file
from small_gpt2 import first_layers

from stage03_engine.core.features.cuda_graphs import cuda_graphs, piecewise, sampling
from stage03_engine.core.features.cuda_graphs.graph_hook import CudaGraphHook
from stage03_engine.core.features.cuda_graphs.piecewise import PiecewiseGraphs
from stage03_engine.core.features.cuda_graphs.sampling import FixedSettings, GraphSampler
from stage03_engine.core.features.cuda_graphs.simulated import check_again
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.sampler import SamplingMetadata
from stagetrace import read_run

SIZES = [1, 2, 4, 8, 16, 40]
SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
}  # fmt: skip
PIECES: dict[str, Any] = {"cudagraph_simulate": True, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": SIZES}
PROMPTS = [[7], [7, 8, 9], list(range(5, 45)), [50] * 33, list(range(5, 40))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=6, ignore_eos=True, n=2, top_p=0.9, presence_penalty=0.5),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "as it starts": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "chunks wider than any size": {"max_num_batched_tokens": 41, "max_num_seqs": 3},
    "preempted": {"num_gpu_blocks_override": 14, "block_size": 8},
    "swapped": {"num_gpu_blocks_override": 14, "block_size": 8, "swap_space": 1, "preemption_mode": "swap"},
    "no prefix cache": {"enable_prefix_caching": False},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "a model that drafts": {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}},
    "offloaded": {"kv_offloading_size": 0.01},
    "8-bit cache": {"kv_cache_dtype": "int8"},
    "reference attention": {"attention_backend": "reference"},
    "learns": {"enable_weight_updates": True},
    "compiled": {"compilation_config": PIECES | {"mode": 3, "backend": "eager"}},
    "compiled, with functions of AOTAutograd": {"compilation_config": PIECES | {"mode": 3, "backend": "aot_eager"}},
}  # fmt: skip


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pieces") / str(request.param)
    if request.param == "gpt2":
        return first_layers(folder, 2)
    small_llama(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_layers(tmp_path_factory.mktemp("pieces") / "alone", 2)


HOOKS: list[CudaGraphHook] = []


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks are noted as they are made; torch keeps what it compiled for the process."""
    HOOKS.clear()
    made = CudaGraphHook.__init__
    monkeypatch.setattr(CudaGraphHook, "__init__", lambda self, *args: HOOKS.append(self) or made(self, *args))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def answers(llm: LLM) -> list[list[int]]:
    asked = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


@cache
def plain(model: str, kv_cache_dtype: str = "auto") -> list[list[int]]:
    with LLM(model, **SMALL, attention_backend="torch", linear_backend="torch", kv_cache_dtype=kv_cache_dtype) as llm:
        return answers(llm)


@torch.inference_mode()
def check_python() -> None:
    """Would Python, run again, still do what the graphs hold?"""
    hook = HOOKS[-1]
    if hook.pieces is not None:
        for size in hook.plan.pieces:
            record = partial(hook.pieces.record, size)
            check_again(hook.pieces.replays(size), record)
    for recorded in hook.full._recorded.values() if hook.full is not None else ():
        check_again(recorded.replay.replays, lambda graphs, run=recorded.run: cuda_graphs.whole(graphs, run))


def test_steps_with_adapters_run_and_the_others_are_replayed(tmp_path: Path) -> None:
    """Alone, and side by side with a request that has none."""
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    ship = msgspec.structs.replace(greedy, lora="ship")
    settings: dict[str, Any] = SMALL | {
        "enable_lora": True,
        "lora_modules": ["ship=gpt2-tiny-ship"],
        "enable_prefix_caching": False,
    }
    found = []
    for more in (
        {"attention_backend": "torch", "linear_backend": "torch"},
        {"compilation_config": PIECES, "trace": str(tmp_path)},
    ):
        with LLM("gpt2-tiny", **settings, **more) as llm:
            asked = [llm.generate([[7, 8, 9]], params) for params in (greedy, ship, greedy)]
            asked.append(llm.generate([[7, 8], [9]], [ship, greedy]))
            found.append([output.outputs[0].token_ids for outputs in asked for output in outputs])
    assert found[0] == found[1] and found[0][0] == found[0][2] != found[0][1]
    modes = [event.args["mode"] for event in read_run(tmp_path).named("graphs.dispatched")]
    assert modes == ["PIECEWISE"] * 4 + ["NONE"] * 4 + ["PIECEWISE"] * 4 + ["NONE"] * 4


@pytest.mark.slow(keep=("gpt2-preempted", "llama-chunks wider", "gpt2-8-bit", "gpt2-a model"))
@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_the_same(model: str, name: str) -> None:
    settings = {"compilation_config": PIECES} | SETTINGS[name]
    if name == "a model that drafts" and "gpt2" not in model:
        pytest.skip("another vocabulary")
    expected = plain(model, settings.get("kv_cache_dtype", "auto"))
    with LLM(model, **SMALL | settings) as llm:
        assert answers(llm) == expected
        if "enable_weight_updates" in settings:  # others, then these again: the graphs read the same memory
            weights = load_file(Path(model) / "model.safetensors")
            llm.update_weights({name: tensor * 1.5 for name, tensor in weights.items()}.items())
            assert answers(llm) != expected
            llm.update_weights(weights.items())
            assert answers(llm) == expected
        if "compiled" not in name:
            check_python()


def test_each_number_of_tokens_takes_the_next_size(gpt2: str, tmp_path: Path) -> None:
    """On both sides of every size. Prompts come one at a time, so a step has a prompt's tokens, or one."""
    prompts = [list(range(3, 3 + length)) for size in SIZES for length in (size - 1, size, size + 1) if length]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    settings: dict[str, Any] = SMALL | {"max_num_seqs": 1, "enable_prefix_caching": False}
    found = []
    for more in (
        {"attention_backend": "torch", "linear_backend": "torch"},
        {"compilation_config": PIECES, "trace": str(tmp_path)},
    ):
        with LLM(gpt2, **settings, **more) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
    run = read_run(tmp_path)
    [captured] = run.named("graphs.captured")
    assert captured.args["kind"] == "piecewise" and captured.args["sizes"] == SIZES
    seen = [event.args for event in run.named("graphs.dispatched")]
    assert [each["num_tokens"] for each in seen] == [count for prompt in prompts for count in (len(prompt), 1)]
    for each in seen:
        fits = [size for size in SIZES if size >= each["num_tokens"]]
        assert (each["mode"], each["size"]) == (("PIECEWISE", fits[0]) if fits else ("NONE", 0))
        why = (
            "41 tokens, more than the largest size, 40"
            if not fits
            else "several tokens"
            if each["num_tokens"] > 1
            else "one token for each"
        )
        assert why in each["why"]


FULL: dict[str, Any] = {
    "attention_backend": "triton-interpret", "linear_backend": "torch", "max_num_seqs": 4, "max_model_len": 32,
    "compilation_config": {"cudagraph_simulate": True, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 3, 5]},
}  # fmt: skip
MIXED = [
    SamplingParams(temperature=0.8, seed=4, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, top_k=20, presence_penalty=1.5, max_tokens=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=2, top_p=0.8, min_p=0.01, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=3, max_tokens=5, ignore_eos=True, logprobs=1),
]


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_layers(tmp_path_factory.mktemp("whole") / "model", 1)


def mixed(llm: LLM) -> list[Any]:
    """Tokens, and what was reported of them, as far as the number of rows of a product does not change it."""
    outputs = llm.generate([[9, 8, 7 + n][: 1 + n % 3] for n in range(len(MIXED))], MIXED)
    found = []
    for [answer] in (output.outputs for output in outputs):
        likely = [
            (each.token_ids, each.sampled_rank, [round(one, 3) for one in each.logprobs])
            for each in answer.logprobs or ()
        ]
        found.append((answer.token_ids, likely))
    return found


@cache
def mixed_plain(model: str) -> list[Any]:
    with LLM(model, **SMALL | FULL | {"compilation_config": None, "enforce_eager": True}) as llm:
        return mixed(llm)


@pytest.mark.slow
def test_decode_steps_are_replayed_with_their_sampler(
    one_layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn rows side by side, that come and go. Only with penalties is the draw made outside, from the graph's logits."""
    outside: list[Any] = []
    own = GraphSampler.sample

    def sample(self: GraphSampler, logits: torch.Tensor, metadata: SamplingMetadata, backend: str = "torch") -> Any:
        replayed = self._logits is not None
        self._sampler, was = lambda *args: outside.append((replayed, metadata)) or was(*args), self._sampler
        try:
            return own(self, logits, metadata, backend)
        finally:
            self._sampler = was

    monkeypatch.setattr(GraphSampler, "sample", sample)
    with LLM(one_layer, **SMALL | FULL, trace=str(tmp_path)) as llm:
        assert mixed(llm) == mixed_plain(one_layer)
        check_python()
    seen = [event.args for event in read_run(tmp_path).named("graphs.dispatched")]
    whole = [each for each in seen if each["mode"] == "FULL"]
    assert {(each["num_tokens"], each["size"]) for each in whole} >= {(1, 1), (2, 3), (3, 3)}
    assert {"PIECEWISE"} <= {each["mode"] for each in seen}
    assert any(each["why"] == "4 requests, more than were recorded whole" for each in seen)
    after_replay = [metadata for replayed, metadata in outside if replayed]
    assert 0 < len(after_replay) < len(whole) and all(metadata.rules is not None for metadata in after_replay)


# Mistakes. Each is one that a GPU would carry out without a word.


def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's tokens take the place of the fixed ones instead of being copied there."""
    original = PiecewiseGraphs.forward

    def forward(self: PiecewiseGraphs, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        self._input_ids = torch.nn.functional.pad(input_ids, (0, self.largest - len(input_ids)))
        return original(self, input_ids, *rest)

    monkeypatch.setattr(PiecewiseGraphs, "forward", forward)


def stale_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention goes on with the metadata of the first step of each size."""
    first: dict[int, Any] = {}
    original = piecewise._Attention.__call__
    monkeypatch.setattr(
        piecewise._Attention, "__call__", lambda self, count, metadata: original(self, count, first.setdefault(count, metadata))
    )  # fmt: skip


def attention_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention gave is left where it is, and the next piece reads the place that was recorded."""
    monkeypatch.setattr(piecewise._Attention, "__call__", lambda self, count, metadata: None)


def stale_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PiecewiseGraphs.forward
    monkeypatch.setattr(
        PiecewiseGraphs, "forward", lambda self, ids, positions, metadata: original(self, ids, self._positions[: len(ids)], metadata)
    )  # fmt: skip


def padding_reaches_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of the padded size go to attention, those of padding with a request's slot."""
    original = piecewise._Attention.__call__

    def call(self: Any, count: int, metadata: Any) -> None:
        size = min(size for size in SIZES if size >= count)
        metadata.slot_mapping = torch.nn.functional.pad(
            metadata.slot_mapping[:count], (0, size - count), value=int(metadata.slot_mapping[0])
        )
        original(self, size, metadata)

    monkeypatch.setattr(piecewise._Attention, "__call__", call)


def not_padded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest size that is not above the step's tokens: the last rows are not computed."""
    monkeypatch.setattr(PiecewiseGraphs, "size_of", lambda self, count: max(size for size in SIZES if size <= count))


IN_PIECES = [
    replaced,
    stale_metadata,
    attention_of_the_recording,
    stale_positions,
    padding_reaches_the_cache,
    not_padded_up,
]


@pytest.mark.parametrize("mistake", IN_PIECES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_pieces_turns_red(
    gpt2: str, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(gpt2)
    mistake(monkeypatch)
    with LLM(gpt2, **SMALL, compilation_config=PIECES) as llm:
        try:
            found = answers(llm)
        except Exception as error:  # the simulation's own, or that of a shape
            found = repr(error)
    assert found != expected


def settings_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling parameters are not copied to where the graph reads."""
    monkeypatch.setattr(FixedSettings, "fill", lambda self, metadata: None)


def settings_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied when the kernels are compiled, and never again."""
    original, kept = FixedSettings.of, dict[int, SamplingMetadata]()

    def of(self: FixedSettings, rows: int) -> SamplingMetadata:
        own = original(self, rows)
        return kept.setdefault(
            rows, SamplingMetadata(own.temperature.clone(), own.top_k, own.top_p, own.min_p, own.noise_keys, [])
        )

    monkeypatch.setattr(FixedSettings, "of", of)


def settings_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read while the graph is recorded."""
    original = FixedSettings.of

    def of(self: FixedSettings, rows: int) -> SamplingMetadata:
        own = original(self, rows)
        return SamplingMetadata(
            own.temperature * 0 + float(own.temperature[0]), own.top_k, own.top_p, own.min_p, own.noise_keys, []
        )

    monkeypatch.setattr(FixedSettings, "of", of)


def last_step_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are kept although the step was not replayed, or with other settings."""
    monkeypatch.setattr(
        GraphSampler, "sample", lambda self, logits, metadata, backend="torch": sampling.SamplerOutput(self._tokens[: len(logits)])
        if self._tokens is not None else self._sampler(logits, metadata, backend),
    )  # fmt: skip


WHOLE = [settings_of_the_first_step, settings_of_the_warm_up, settings_as_numbers, last_step_tokens]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WHOLE, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_whole_steps_turns_red(
    one_layer: str, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes 3 alone, so that smaller batches are padded."""
    expected = mixed_plain(one_layer)
    mistake(monkeypatch)
    settings = FULL | {"compilation_config": FULL["compilation_config"] | {"cudagraph_capture_sizes": [3]}}
    try:
        with LLM(one_layer, **SMALL | settings) as llm:
            found: Any = mixed(llm)
            check_python()
    except Exception as error:
        found = repr(error)
    assert found != expected
