"""Low-rank sums of several adapters: every way against its twin, which takes one row after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from kernel_guard import guard
from torch import Tensor

from stage04_kernels.backends.native import library
from stage04_kernels.features.lora import (
    NO_PLACE,
    AddLowRank,
    LowRankKernel,
    RowGroups,
    add_low_rank,
    add_low_rank_reference,
    low_rank_kernel,
)
from stage04_kernels.lab import check_lora
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.triton_kernels.lora import add_low_rank_triton


def add_low_rank_native(y: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
    return low_rank_kernel("native", y.dtype, a.dtype).add(y, x, a, b, groups)


WAYS: dict[str, AddLowRank] = {"torch": add_low_rank, "triton": add_low_rank_triton, "native": add_low_rank_native}
needs_native = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
NATIVE = [torch.float32, torch.bfloat16]


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


@needs_native
@given(
    place_of=st.lists(st.integers(-1, 3), min_size=1, max_size=40), rank=st.integers(1, 20),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 200)), rows=st.sampled_from(NATIVE), pairs=st.sampled_from(NATIVE), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_native_sums_have_the_bits_that_each_row_has_alone(
    place_of: list[int], rank: int, sizes: tuple[int, int], rows: torch.dtype, pairs: torch.dtype, seed: int
) -> None:
    """Whatever the number formats: sums are float32, so that only the result is rounded. Nor do neighbours that hold NaN show."""
    y, x, a, b = case(place_of, 4, rank, sizes, torch.float32, seed)
    y, x, a, b = y.to(rows), x.to(rows), a.to(pairs), b.to(pairs)
    slow = add_low_rank_reference(y, x, a, b, RowGroups.of(place_of))
    together = add_low_rank_native(y.clone(), x, a, b, RowGroups.of(place_of))
    tolerance = TOLERANCES[rows]
    torch.testing.assert_close(together, slow, atol=tolerance.atol, rtol=tolerance.rtol)
    for row, place in enumerate(place_of):
        alone = add_low_rank_native(y[row : row + 1].clone(), x[row : row + 1], a, b, RowGroups.of([place]))
        assert torch.equal(alone[0], together[row]), f"the bits of row {row} depend on its neighbours"
    x[1::2] = torch.nan
    assert torch.equal(add_low_rank_native(y.clone(), x, a, b, RowGroups.of(place_of))[::2], together[::2])


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_native_sums_of_large_layers_have_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    place_of = [1, 0, -1, 2, 2, 1, 0, 0, 0, 1, 2] * 7
    y, x, a, b = case(place_of, 3, 13, (700, 1111), torch.float32, 0)
    alone = [
        add_low_rank_native(y[r : r + 1].clone(), x[r : r + 1], a, b, RowGroups.of([p])) for r, p in enumerate(place_of)
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(add_low_rank_native(y.clone(), x, a, b, RowGroups.of(place_of)), torch.cat(alone))
    finally:
        torch.set_num_threads(before)


@needs_native
def test_native_sums_of_tensors_that_do_not_lie_side_by_side() -> None:
    place_of = [1, 0, -1, 1]
    y, x, a, b = case(place_of, 2, 6, (40, 33), torch.float32, 0)
    wanted = add_low_rank_native(y.clone(), x, a, b, RowGroups.of(place_of))
    apart = [torch.stack([each, each], dim=-1)[..., 0] for each in (y, x, a, b)]
    result = add_low_rank_native(*apart, RowGroups.of(place_of))
    assert result.data_ptr() == apart[0].data_ptr() and torch.equal(result, wanted)


@needs_native
def test_a_recorded_sum_reads_the_places_of_its_rows_anew() -> None:
    from stage04_kernels.backends.native.graph import record

    y, x, a, b = case([0, 1], 2, 4, (24, 40), torch.float32, 0)
    places, out = np.full(5, NO_PLACE, dtype=np.int64), torch.empty_like(y)
    fixed = RowGroups.of(places)
    replay = record(lambda: add_low_rank_native(out, x, a, b, fixed))
    for place_of in ([NO_PLACE, 1], [1, 0], [NO_PLACE, NO_PLACE]):
        out.copy_(y)
        places[:2] = place_of
        assert torch.equal(replay(), add_low_rank_native(y.clone(), x, a, b, RowGroups.of(place_of)))


def test_which_backend_has_which() -> None:
    assert low_rank_kernel("torch").add is add_low_rank
    assert low_rank_kernel("triton").add is low_rank_kernel("triton-interpret").add is add_low_rank_triton
    assert low_rank_kernel("native", torch.float32, torch.float16).add is add_low_rank, "not compiled for float16"
    compiled = low_rank_kernel("native", torch.float32, torch.bfloat16).add is not add_low_rank
    assert compiled == (library.problem() is None)


def test_without_a_compiler_torch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "problem", lambda: "no C++ compiler was found")
    assert low_rank_kernel("native", torch.float32, torch.float32).add is add_low_rank


@pytest.mark.parametrize("backend", ["torch", "native", "triton-interpret"])
def test_places_are_empty_and_look_the_same_however_they_lie(backend: str) -> None:
    a, b = low_rank_kernel(backend, torch.float32).places(3, 4, (5, 6), torch.float32, torch.device("cpu"))
    assert (a.shape, b.shape) == ((3, 4, 5), (3, 6, 4))
    assert not a.any() and not b.any()
    assert b.is_contiguous() == (low_rank_kernel(backend).outputs_last is False)


def test_the_check_command_sees_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice_the_scale(y: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
        return add_low_rank(y, x, a, 2 * b, groups)

    assert all(row.ok and row.cases for row in check_lora.check_low_rank(0))
    monkeypatch.setattr(check_lora, "low_rank_kernel", lambda *formats: LowRankKernel(twice_the_scale))
    rows = list(check_lora.check_low_rank(0))
    assert {row.ok for row in rows if "nobody" not in row.what} == {False}
