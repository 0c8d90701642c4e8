"""Decode graphs without a GPU: a recording is replayed as the function that it recorded, so that all around it is real."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.cuda_graphs.cuda_graphs import DecodeGraphs, graph_sizes
from stage03_engine.core.models.loader import get_model
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.lab.cases import make_metadata

os.environ["TRITON_INTERPRET"] = "1"
BLOCK, MAX_LEN, CPU = 16, 64, torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Through the Triton kernels, which read tensors only: the torch path looks at the lists on the host."""
    config = EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu", attention_backend="triton-interpret")
    return get_model(config, torch.float32, CPU)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [1]), (3, [1, 2, 3]), (9, [1, 2, 4, 8, 9]), (16, [1, 2, 4, 8, 16])]
)
def test_sizes_end_with_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def step(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """A decode step of requests with these contexts, each in blocks of its own."""
    tables = [[1 + 4 * i + j for j in range(-(-length // BLOCK))] for i, length in enumerate(lengths)]
    tokens = torch.randint(500, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    metadata = make_metadata([1] * len(lengths), lengths, tables, BLOCK)
    return tokens, torch.tensor(lengths) - 1, metadata


def test_a_replayed_step_equals_the_model_at_any_batch_size_and_after_larger_ones(model: torch.nn.Module) -> None:
    """What a larger step left in the fixed tensors must not show in the smaller one that follows, nor in the cache."""
    shape = EngineArgs.from_kwargs(model="gpt2-tiny", device="cpu").shape
    size = (2, 14, BLOCK, shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(size, generator=generator) for _ in range(shape.num_layers)]
    graphed = [cache.clone() for cache in plain]
    ran: list[int] = []

    def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            output = run()
            ran.append(len(output))
            return output

        return replay

    graphs = DecodeGraphs(model, graphed, MAX_LEN // BLOCK, MAX_LEN, 3, CPU, capture)
    with torch.inference_mode():
        for seed, lengths in enumerate([[40, 5, 17], [33], [2, 64], [18]]):
            inputs = step(lengths, seed)
            assert graphs.fits(inputs[2])
            wanted = model(inputs[0], inputs[1], plain, step(lengths, seed)[2])
            torch.testing.assert_close(graphs.forward(*inputs), wanted, atol=1e-5, rtol=1e-5)
            for ours, theirs in zip(graphed, plain):
                torch.testing.assert_close(ours, theirs)
    assert ran == [3, 1, 2, 1]


def test_prompts_and_larger_batches_go_the_plain_way(model: torch.nn.Module) -> None:
    graphs = DecodeGraphs(model, [], 4, MAX_LEN, 2, CPU, capture=lambda run: run)
    assert graphs.fits(step([5, 6], 0)[2])
    assert not graphs.fits(step([5, 6, 7], 0)[2])
    assert not graphs.fits(make_metadata([2], [5], [[1]], BLOCK))
