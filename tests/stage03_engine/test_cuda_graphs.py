"""Decode graphs without a GPU: a recording is replayed as the function that it recorded, so that all around it is real."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from triton.runtime import interpreter

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.cuda_graphs import graph_hook, native_graphs
from stage03_engine.core.features.cuda_graphs.cuda_graphs import CudaGraphs, DecodeGraphs, whole
from stage03_engine.core.features.cuda_graphs.graph_hook import CudaGraphHook
from stage03_engine.core.features.cuda_graphs.modes import decode_sizes
from stage03_engine.core.features.cuda_graphs.plan import Plan
from stage03_engine.core.features.cuda_graphs.warm_up import warm_up
from stage03_engine.core.features.memory_profile import memory_profile
from stage03_engine.core.features.memory_profile.memory_profile import (
    dummy_inputs,
    measure_activations,
    sampling_settings,
)
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.loader import get_model
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.backends.native import graph, library
from stage04_kernels.backends.native.graph import NotRecordableError, record
from stage04_kernels.backends.native.linear import NativeLinear
from stage04_kernels.features.logits_processors import LogitsRules, Penalties
from stage04_kernels.lab.cases import make_metadata
from stage04_kernels.sampler import SamplingMetadata, sample
from stagetrace import read_run, trace

os.environ["TRITON_INTERPRET"] = "1"
BLOCK, MAX_LEN, CPU = 16, 64, torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Of two layers: what a row writes in the second depends on what it reads. Through the Triton kernels, which read tensors only: the
    torch path looks at the lists on the host."""
    config = EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu", attention_backend="triton-interpret")
    model: Any = get_model(config, torch.float32, CPU)
    model.h = model.h[:2]
    return model


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [1]), (3, [1, 2, 3]), (9, [1, 2, 4, 8, 9]), (16, [1, 2, 4, 8, 16])]
)
def test_sizes_end_with_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert decode_sizes(max_num_seqs) == sizes


def step(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """A decode step of requests with these contexts, each in blocks of its own."""
    tables = [[1 + 4 * i + j for j in range(-(-length // BLOCK))] for i, length in enumerate(lengths)]
    tokens = torch.randint(500, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    metadata = make_metadata([1] * len(lengths), lengths, tables, BLOCK)
    return tokens, torch.tensor(lengths) - 1, metadata


@pytest.mark.parametrize(("sizes", "replayed"), [([1, 2, 3], [3, 1, 2, 1]), ([2, 4], [4, 2, 2, 2]), ([4], [4] * 4)])
@pytest.mark.slow(keep="sizes1")
def test_a_replayed_step_equals_the_model_at_any_batch_size_and_after_larger_ones(
    model: Any, sizes: list[int], replayed: list[int]
) -> None:
    """What a larger step left in the fixed tensors must not show in the smaller one that follows, nor in the cache."""
    shape = EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu").shape
    size = (2, 14, BLOCK, shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(size, generator=generator) for _ in model.h]
    graphed = [cache.clone() for cache in plain]
    ran: list[int] = []

    def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            output = run()
            ran.append(len(output))
            return output

        return replay

    graphs = DecodeGraphs(model, graphed, MAX_LEN // BLOCK, MAX_LEN, sizes, CPU, capture)
    with torch.inference_mode():
        for seed, lengths in enumerate([[40, 5, 17], [33], [2, 64], [18]]):
            inputs = step(lengths, seed)
            assert graphs.fits(inputs[2])
            wanted = model(inputs[0], inputs[1], plain, step(lengths, seed)[2])
            torch.testing.assert_close(graphs.forward(*inputs), wanted, atol=1e-5, rtol=1e-5)
            for ours, theirs in zip(graphed, plain):
                torch.testing.assert_close(ours, theirs)
    assert ran == replayed


@pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
@pytest.mark.parametrize("model_name", ["gpt2-tiny", "llama"])
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"linear_backend": "torch"}])
@pytest.mark.slow(keep=("settings0-llama", "settings2-gpt2"))
def test_recorded_native_steps_give_the_same_bits(
    model_name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come and go, so that steps of 1 to 10 requests follow each other; of more than 8, none is recorded."""
    if model_name == "llama":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        settings = {**settings, "load_format": "dummy"}
    folder = str(tmp_path) if model_name == "llama" else model_name
    replayed: list[int] = []
    plain_forward = native_graphs.NativeGraphHook.forward

    def forward(
        hook: native_graphs.NativeGraphHook, inputs: StepInputs, run: Callable[[StepInputs], torch.Tensor]
    ) -> torch.Tensor:
        passed_on: list[StepInputs] = []
        hidden = plain_forward(hook, inputs, lambda same: passed_on.append(same) or run(same))
        replayed.append(0 if passed_on else len(hidden))
        return hidden

    monkeypatch.setattr(native_graphs.NativeGraphHook, "forward", forward)
    prompts = [[7 * i + j for j in range(1 + 3 * i)] for i in range(10)]
    params = [SamplingParams(temperature=0, max_tokens=3 + 4 * i, ignore_eos=True, logprobs=1) for i in range(10)]
    found = []
    for eager in (False, True):
        with LLM(
            folder, device="cpu", max_model_len=64, block_size=8, enforce_eager=eager,
            attention_backend="native", num_gpu_blocks_override=200, **settings,
        ) as llm:  # fmt: skip
            found.append([output.outputs[0] for output in llm.generate(prompts, params)])
    assert set(range(9)) <= set(replayed), "not every size was replayed"
    for recorded, plain in zip(*found, strict=True):
        assert (recorded.token_ids, recorded.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
def test_what_a_replay_would_not_repeat_is_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(NotRecordableError, match="_local_scalar_dense"):
        record(lambda: x * float(x.sum()))
    with pytest.raises(NotRecordableError, match="pack_float32"):
        record(lambda: NativeLinear(x)(torch.ones(1, 3)))
    with pytest.raises(NotRecordableError, match="index cannot"):
        record(lambda: x[x[:, 0] > 5])
    replay = record(lambda: x.clone().add_(1).view(-1)[:4] * 2)
    x.fill_(3)
    assert replay().tolist() == [8.0] * 4, "a replay reads what its inputs hold now"


@pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
def test_the_trace_says_which_decode_steps_were_recorded(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"attention_backend": "native", "num_gpu_blocks_override": 8, "max_num_seqs": 3}
    for eager in (False, True):
        folder = tmp_path / str(eager)
        trace.hold("LLM")
        trace.open(str(folder))
        with LLM("gpt2-tiny", **flags, enforce_eager=eager, max_model_len=64):
            trace.close()
        names = [event.name for event in read_run(folder).events]
        assert ("graphs.captured" in names) is not eager
        if not eager:
            (captured,) = read_run(folder).named("graphs.captured")
            assert captured.args["kind"] == "native" and captured.args["sizes"] == [1, 2, 3]
            allocated, created = names.index("kv_cache.allocated"), names.index("scheduler.created")
            assert allocated < names.index("graphs.captured") < created


def test_to_record_imports_no_compiler() -> None:
    """torch wraps what a dispatch mode defines, unless asked not to, in a function that imports torch._dynamo at its first call."""
    assert not hasattr(graph._Recorder.__torch_dispatch__, "__wrapped__")


def test_prompts_and_larger_batches_go_the_plain_way(model: torch.nn.Module) -> None:
    graphs = DecodeGraphs(model, [], 4, MAX_LEN, [1, 2], CPU, capture=lambda run: run)
    assert graphs.fits(step([5, 6], 0)[2])
    assert not graphs.fits(step([5, 6, 7], 0)[2])
    assert not graphs.fits(make_metadata([2], [5], [[1]], BLOCK))


class FakeCuda:
    """What torch.cuda offers, for graphs that record nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[object] = []
        self.order: list[str] = []
        for name in ("Stream", "current_stream", "empty_cache", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        self.on_its_stream = False
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.graph)

    def graph(self) -> MagicMock:
        graph = MagicMock()
        graph.capture_begin = lambda pool: self.pools.append(pool) or self.order.append("begin")
        graph.capture_end = self.end
        return graph

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.on_its_stream = True
        try:
            yield
        finally:
            self.on_its_stream = False

    def end(self) -> None:
        self.order.append("end")
        if not self.on_its_stream:
            raise RuntimeError("Capture must end on the same stream it began on.")


def test_all_graphs_record_into_one_pool_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, ran = FakeCuda(monkeypatch), []
    graphs = CudaGraphs()
    for size in (8, 4, 2):
        output = torch.zeros(size)
        assert whole(graphs, lambda output=output: ran.append(len(output)) or output)() is output
    assert len(fake.pools) == 3 and fake.pools[0] is not None and len(set(fake.pools)) == 1
    assert ran == [8] * 3 + [4] * 3 + [2] * 3  # twice before it is recorded
    assert fake.order == ["begin", "end"] * 3


def test_what_is_raised_while_a_graph_is_recorded_ends_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that goes on recording would break whatever comes next, the message included; and Python's garbage is collected again."""
    fake, calls = FakeCuda(monkeypatch), iter([0, 0])

    def run() -> torch.Tensor:
        next(calls)
        return torch.zeros(1)

    with pytest.raises(StopIteration):
        whole(CudaGraphs(), run)
    assert fake.order == ["begin", "end"] and gc.isenabled()


@pytest.fixture
def runner() -> Any:
    """On a CPU, through the kernels of a GPU."""
    settings: dict[str, Any] = {"device": "cpu", "attention_backend": "triton-interpret", "max_num_seqs": 16}
    runner = ModelRunner(EngineArgs.from_kwargs(model="gpt2-tiny", max_model_len=64, **settings), CPU)
    runner.load_model()
    return runner


def test_graphs_are_reserved_for_before_the_cache_is_sized(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """16 requests: graphs of 16, 8, 4, 2 and 1. The largest takes 500 bytes, the next 10 more, so the five take 540."""
    FakeCuda(monkeypatch)
    free = iter([10_000, 9_500, 10_000, 9_490])
    monkeypatch.setattr(graph_hook, "free_bytes", lambda: next(free))
    recorded: list[list[int]] = []
    monkeypatch.setattr(CudaGraphHook, "_record", lambda self, caches, sizes, capture: recorded.append(sizes))
    hook = CudaGraphHook(runner, runner.config)
    hook.plan = replace(hook.plan, sampler=False)
    monkeypatch.setattr(runner, "device", MagicMock(type="cuda"))
    monkeypatch.setattr(runner, "new_kv_caches", lambda blocks, device: [])
    assert hook.reserved_bytes() == 540
    assert recorded == [[16], [8, 16]]


def test_pieces_alone_are_reserved_for_too(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """No decode step is recorded whole then, so no graph has a sampler."""
    FakeCuda(monkeypatch)
    recorded: list[list[int]] = []
    monkeypatch.setattr(graph_hook, "free_bytes", lambda: 0)
    monkeypatch.setattr(graph_hook, "PiecewiseGraphs", lambda model, caches, sizes, *rest: recorded.append(sizes))
    hook = CudaGraphHook(runner, runner.config)
    asked = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 8, 16]}
    hook.plan = Plan.of(EngineArgs.from_kwargs(model="gpt2-tiny", device="cuda", compilation_config=asked))
    monkeypatch.setattr(runner, "device", MagicMock(type="cuda"))
    monkeypatch.setattr(runner, "new_kv_caches", lambda blocks, device: [])
    assert hook.reserved_bytes() == 0
    assert recorded == [[16], [8, 16]]


def test_activations_are_counted_once_and_hooks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator gives back what the largest step left, before the worker looks at the free memory."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1700)
    monkeypatch.setattr(memory_profile, "profile_run", lambda runner: order.append("run"))
    hooks = [MagicMock(reserved_bytes=lambda: 40), MagicMock(reserved_bytes=lambda: 2)]
    assert measure_activations(cast(Any, MagicMock(device=MagicMock(type="cuda"), hooks=hooks))) == 742
    assert order == ["empty", "run", "empty"]


def test_the_largest_step_samples_with_everything_on() -> None:
    metadata = sampling_settings(3, 50, CPU, True, True, 20)
    assert metadata.top_k is not None and metadata.top_p is not None and metadata.min_p is not None
    assert metadata.random_rows == [0, 1, 2] and metadata.max_num_logprobs == 20
    assert metadata.rules is not None and metadata.rules.penalties is not None


def test_after_the_warm_up_no_request_compiles_a_kernel(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    """A kernel is compiled for each choice of its constants: what requests of every kind launch, the warm-up has launched."""
    launched: set[tuple[str, frozenset[Any]]] = set()
    call = interpreter.GridExecutor.__call__

    def noted(executor: Any, *arguments: Any, **constants: Any) -> None:
        missing = {name: None for name, value in zip(executor.arg_names, arguments) if value is None}
        sizes = {"BLOCK_M", "BLOCK_N"}  # on a GPU there are two of each; the interpreter's follow the batch
        kept = {name: value for name, value in (missing | constants).items() if name not in sizes}
        launched.add((executor.fn.__name__, frozenset(kept.items())))
        call(executor, *arguments, **constants)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    runner.model.h = runner.model.h[:1]  # one layer has all kernels
    new_kv_caches = runner.new_kv_caches
    monkeypatch.setattr(runner, "new_kv_caches", lambda blocks, device: new_kv_caches(blocks, device)[:1])
    warm_up(runner)
    warm = set(launched)
    caches, vocab = runner.new_kv_caches(2, CPU), runner.config.shape.vocab_size
    for length in (1, 5, 60):
        inputs = dummy_inputs(runner.batch, [length], CPU)
        runner.model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
    ones = torch.ones(1)
    penalties = Penalties(torch.tensor([0]), torch.zeros(1, vocab).bool(), torch.zeros(1, vocab), ones, ones, ones)
    for top_k, top_p, min_p, num_logprobs, rules in (
        (0, 1.0, 0.0, 1, None), (0, 0.9, 0.0, None, None), (5, 1.0, 0.1, 16, LogitsRules(penalties=penalties)),
        (0, 1.0, 0.0, 0, LogitsRules(penalties=penalties)),
    ):  # fmt: skip
        metadata = SamplingMetadata.from_lists([1.0], [top_k], [top_p], [min_p], [7], [0], num_logprobs, CPU, rules)
        sample(torch.randn(1, vocab), metadata, "triton-interpret")
    assert len(warm) > 8 and launched - warm == set()
