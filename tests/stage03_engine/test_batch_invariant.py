"""--batch-invariant: tokens and logprobs equal to the last bit, alone, in company, in chunks, after preemption."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from small_gpt2 import first_layers
from torch import Tensor, nn

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.batch_invariant.batch_invariant import (
    BatchInvariantModel,
    make_batch_invariant,
    rows_are_independent,
)
from stage03_engine.core.models.loader import get_model
from stage03_engine.core.worker import Worker
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import resolve_backend
from stage04_kernels.backends.batch_invariant import ROWS

COMMON: dict[str, Any] = {"batch_invariant": True, "max_model_len": 96, "block_size": 8, "num_threads": 1}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"num_gpu_blocks_override": 120},
    "chunks": {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 11, "max_num_seqs": 4},
    "preemption": {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 40, "max_num_seqs": 8},
    "drafts": {"num_gpu_blocks_override": 120, "speculative_config": NGRAM},
}
PROMPTS: list[list[int]] = [[5], [1, 2, 3] * 7, list(range(100, 160)), list(range(900, 917)), [7, 8] * 16, [2047] * 3]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, min_p=0.02, max_tokens=20, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=1.2, seed=4, top_k=40, max_tokens=12, ignore_eos=True, logprobs=0),
]

Answer = tuple[list[int], list[list[float]]]


def answers(llm: LLM, batch: list[tuple[int, int]]) -> list[Answer]:
    outputs = llm.generate([PROMPTS[p] for p, _ in batch], [PARAMS[s] for _, s in batch])
    return [(o.outputs[0].token_ids, [each.logprobs for each in o.outputs[0].logprobs]) for o in outputs]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    """Of one layer: bfloat16 is slow on most CPUs, and each layer does the same."""
    model = first_layers(tmp_path_factory.mktemp("models") / "one_layer", 1)
    llms = {name: LLM(model, dtype=request.param, **COMMON, **more) for name, more in ENGINES.items()}
    yield llms
    preemptions = llms["preemption"].engine_core._core.scheduler.stats.num_preemptions
    accepted = llms["drafts"].engine_core._core.scheduler.stats.counts.get("spec_decode_num_accepted_tokens", 0)
    for llm in llms.values():
        llm.shutdown()
    assert preemptions and accepted, "the test is void if nothing was preempted, or no draft accepted"


@pytest.mark.slow(keep="float32")
def test_bit_equal_in_any_company(engines: dict[str, LLM]) -> None:
    alone: dict[tuple[int, int], Answer] = {}

    @settings(max_examples=settings.default.max_examples // 10, database=None, derandomize=True)
    @given(
        st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1)), min_size=2, max_size=7),
        st.permutations(list(ENGINES)),
    )
    def check(batch: list[tuple[int, int]], names: list[str]) -> None:
        for name in names[:2]:
            for pair, answer in zip(batch, answers(engines[name], batch)):
                if pair not in alone:
                    [alone[pair]] = answers(engines["roomy"], [pair])
                assert answer == alone[pair], (name, pair)

    check()
    everything = [(p, s) for p in (1, 2) for s in range(len(PARAMS))]
    for name, llm in engines.items():
        for pair, answer in zip(everything, answers(llm, everything)):
            if pair not in alone:
                [alone[pair]] = answers(engines["roomy"], [pair])
            assert answer == alone[pair], (name, pair)


def test_it_is_the_same_model() -> None:
    """Beside the plain engine: the same greedy tokens, and logprobs as close as float32 allows."""
    with LLM("gpt2-tiny", **COMMON | {"batch_invariant": False}, **ENGINES["roomy"]) as plain:
        wanted = answers(plain, [(p, 0) for p in range(len(PROMPTS))])
    with LLM("gpt2-tiny", **COMMON, **ENGINES["roomy"]) as invariant:
        got = answers(invariant, [(p, 0) for p in range(len(PROMPTS))])
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(wanted, got):
        assert tokens == other_tokens
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(other_logprobs), atol=1e-4, rtol=1e-4)


class PlaceDependent(nn.Module):
    """A model whose last bits depend on the row's place, as with a library that treats the last rows differently."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, *others: Any) -> Tensor:
        hidden = self.model(input_ids, *others)
        return torch.cat([hidden[:-1], torch.nextafter(hidden[-1:], torch.tensor(9.0))]) if len(hidden) > 1 else hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)


class NeighbourDependent(PlaceDependent):
    def forward(self, input_ids: Tensor, *others: Any) -> Tensor:
        hidden = self.model(input_ids, *others)
        return hidden + 1e-6 * hidden.sum() if len(hidden) > 1 else hidden


@pytest.mark.parametrize(("wrapper", "rows"), [(None, ROWS), (PlaceDependent, 1), (NeighbourDependent, 1)])
def test_where_rows_depend_on_each_other_each_goes_alone(wrapper: type[PlaceDependent] | None, rows: int) -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", **COMMON)
    dtype, device = torch.float32, torch.device("cpu")
    model = get_model(config, dtype, device)
    if wrapper is not None:
        model = wrapper(model)
        assert not rows_are_independent(BatchInvariantModel(model, ROWS), config, dtype, device)
    wrapped = make_batch_invariant(model, config, dtype, device)
    assert isinstance(wrapped, BatchInvariantModel) and wrapped.rows == rows
    assert rows_are_independent(wrapped, config, dtype, device)


def test_the_flag_brings_its_backend_and_refuses_others() -> None:
    def backend(**settings: Any) -> str:
        return EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu", **settings).device_config.attention_backend

    assert backend() == backend(batch_invariant=False) == resolve_backend("auto")
    assert backend(batch_invariant=True) == "batch_invariant"
    assert backend(batch_invariant=True, attention_backend="batch_invariant") == "batch_invariant"
    with pytest.raises(ConfigError, match="batch_invariant needs attention_backend auto or batch_invariant, not torch"):
        backend(batch_invariant=True, attention_backend="torch")


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (2, 2), (3, 2), (7, 4)])
def test_threads_are_a_power_of_two(asked: int, used: int) -> None:
    before = torch.get_num_threads()
    try:
        Worker(EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu", batch_invariant=True, num_threads=asked))
        assert torch.get_num_threads() == used
        Worker(EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu", num_threads=asked))
        assert torch.get_num_threads() == asked
    finally:
        torch.set_num_threads(before)
