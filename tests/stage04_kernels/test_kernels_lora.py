"""Low-rank sums of several adapters: every way against its twin, which takes one row after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_guard import guard

from stage04_kernels.features.lora import (
    NO_PLACE,
    AddLowRank,
    RowGroups,
    add_low_rank,
    add_low_rank_reference,
    low_rank_kernel,
)
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.triton_kernels.lora import add_low_rank_triton

WAYS = {"torch": add_low_rank, "triton": add_low_rank_triton}


def case(
    place_of: list[int], num_places: int, rank: int, sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, ...]:
    """y, x, a, b. Places that nobody uses hold NaN; so do none of the rows' own numbers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    size_in, size_out = sizes
    a, b = random(num_places, rank, size_in) / size_in**0.5, random(num_places, size_out, rank) / rank**0.5
    unused = [place for place in range(num_places) if place not in place_of]
    a[unused], b[unused] = torch.nan, torch.nan
    y, x = random(len(place_of), size_out), random(len(place_of), size_in)
    return tuple(tensor.to(dtype) for tensor in (y, x, a, b))


def compare(way: AddLowRank, place_of: list[int], tensors: tuple[torch.Tensor, ...]) -> None:
    y, x, a, b = tensors
    groups = RowGroups.of(place_of)
    slow, rest = add_low_rank_reference(y, x, a, b, groups), [place == NO_PLACE for place in place_of]
    before = y.clone()
    fast = way(y, x, a, b, groups)
    tolerance = TOLERANCES[y.dtype]
    # Two products in a row, each rounded: of numbers about 1, so that one step more counts as much as the tolerance.
    torch.testing.assert_close(fast, slow, atol=4 * tolerance.atol, rtol=4 * tolerance.rtol)
    assert torch.equal(fast[rest], before[rest]), "a row without an adapter changed"


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(
    place_of=st.lists(st.integers(-1, 4), max_size=40), rank=st.sampled_from([1, 4, 8, 16, 20, 64]),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)), dtype=st.sampled_from(list(TOLERANCES)), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_all_ways_equal_the_twin(
    way: str, place_of: list[int], rank: int, sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    compare(WAYS[way], place_of, case(place_of, 5, rank, sizes, dtype, seed))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "place_of", [[], [-1] * 5, [2] * 33, [0, 1, 2, 3, 4] * 9, [0] * 16 + [1] * 17, [4, -1, 4, 0]], ids=str
)
def test_rows_at_the_edges_of_tiles(way: str, place_of: list[int]) -> None:
    compare(WAYS[way], place_of, case(place_of, 5, 16, (300, 520), torch.float32, 0))


def test_the_kernels_touch_only_what_is_theirs() -> None:
    place_of = [1, -1, 0, 1] * 5
    tensors = case(place_of, 2, 5, (37, 41), torch.float32, 0)
    with guard() as report:
        compare(add_low_rank_triton, place_of, tensors)
    assert not report.findings, str(report)


def test_pairs_of_another_number_format() -> None:
    """--lora-dtype: the products are computed in it, and added in the model's."""
    place_of = [0, 1, -1, 1]
    y, x, a, b = case(place_of, 2, 4, (24, 40), torch.float32, 0)
    slow = add_low_rank_reference(y, x, a, b, RowGroups.of(place_of))
    for way in WAYS.values():
        fast = way(y.clone(), x, a.bfloat16(), b.bfloat16(), RowGroups.of(place_of))
        assert fast.dtype == torch.float32
        torch.testing.assert_close(fast, slow, atol=5e-2, rtol=5e-2)


def test_which_backend_has_which() -> None:
    assert low_rank_kernel("torch") is low_rank_kernel("native") is add_low_rank
    assert low_rank_kernel("triton") is low_rank_kernel("triton-interpret") is add_low_rank_triton
