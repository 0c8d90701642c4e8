"""Guard mode and the paged-KV sanitizer: kernels with a planted bug are named with argument and index; the real ones are clean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_guard import BlockOwners, guard

from stage04_kernels.backends.reference import paged_attention_reference
from stage04_kernels.lab.cases import make_attention_case
from stage04_kernels.paged_attention import write_kv
from stage04_kernels.triton_kernels.backend import triton_attention
from stage04_kernels.triton_kernels.layers import gelu_triton, rms_norm_triton
from stage04_kernels.triton_kernels.logprobs import gather_logprobs_triton
from stage04_kernels.triton_kernels.paged_attention import paged_attention_triton
from stage04_kernels.triton_kernels.sampler import sample_triton


@triton.jit
def _copy(x_ptr, out_ptr, num_elements, SHIFT: tl.constexpr, OVERLAP: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * (TILE - OVERLAP) + tl.arange(0, TILE)
    x = tl.load(x_ptr + at + SHIFT, mask=at < num_elements, other=0.0)
    tl.store(out_ptr + at, x, mask=at < num_elements)


def copy(x: torch.Tensor, shift: int = 0, overlap: int = 0) -> torch.Tensor:
    out = torch.empty(x.shape)
    _copy[(4,)](x, out, x.numel(), SHIFT=shift, OVERLAP=overlap, TILE=8)
    return out


def findings(x: torch.Tensor, **bug: int) -> list[tuple[str, str, str, tuple[int, ...], tuple[int, int, int]]]:
    with guard() as report:
        copy(x, **bug)
    return [(f.kind, f.kernel, f.argument, f.index, f.program) for f in report.findings]


def test_a_right_kernel_is_clean_and_its_result_arrives() -> None:
    x = torch.arange(32.0).view(4, 8)
    with guard() as report:
        out = copy(x)
    assert not report.findings and str(report) == "nothing found"
    assert torch.equal(out, x)


@pytest.mark.parametrize(("shift", "index", "program"), [(1, 32, (3, 0, 0)), (-2, -2, (0, 0, 0)), (5, 32, (3, 0, 0))])
def test_a_load_out_of_bounds_is_named(shift: int, index: int, program: tuple[int, int, int]) -> None:
    assert findings(torch.rand(4, 8), shift=shift) == [("out of bounds", "_copy", "x_ptr", (index,), program)]


def test_a_gap_between_the_rows_of_a_view_is_out_of_bounds() -> None:
    """Rows of 8 in rows of 10: the kernel takes the view for dense memory."""
    kinds = {(kind, argument) for kind, _, argument, _, _ in findings(torch.rand(4, 10)[:, :8])}
    assert kinds == {("out of bounds", "x_ptr")}


def test_two_programs_that_write_one_element_are_named() -> None:
    first = findings(torch.rand(29), overlap=1)[0]
    assert first == ("written twice", "_copy", "out_ptr", (7,), (1, 0, 0))


def test_memory_that_nobody_has_written_is_named() -> None:
    with guard() as report:
        x = torch.empty(4, 8)
        x[:3] = 1.0
        copy(x)
    assert [(f.kind, f.argument, f.index) for f in report.findings] == [("uninitialised", "x_ptr", (3, 0))]


def test_what_one_kernel_wrote_another_may_read() -> None:
    with guard() as report:
        copy(copy(torch.rand(32)))
    assert not report.findings


def owners(case: Any) -> BlockOwners:
    owned = [{int(block) for block in row if block >= 0} for row in case.metadata.block_table]
    return BlockOwners(owned, [f"cmpl-{i}" for i in range(len(owned))], step=17)


def test_real_attention_is_clean_also_with_shared_blocks_and_padding() -> None:
    case = make_attention_case([1, 9, 1], [64, 48, 33], num_shared=3, num_padding=2)
    wanted = case.kv_cache.clone()
    write_kv(case.key, case.value, wanted, case.metadata.slot_mapping)
    with guard(owners(case)) as report:
        tensors = (case.query, case.key, case.value, case.kv_cache)
        out = triton_attention(*tensors, case.metadata, case.scale, None, None)
        paged_attention_triton(case.query, case.kv_cache, case.metadata, case.scale, num_splits=4)
    assert not report.findings, report
    torch.testing.assert_close(out, paged_attention_reference(case.query, wanted, case.metadata, case.scale))


def test_the_other_real_kernels_are_clean() -> None:
    with guard() as report:
        gelu_triton(torch.randn(3, 100))
        rms_norm_triton(torch.randn(3, 100), torch.randn(3, 100), torch.rand(100), 1e-5)
        logits, numbers = torch.randn(3, 301), torch.arange(3)
        top_k, top_p = torch.tensor([0, 5, 50]), torch.tensor([0.5, 1.0, 0.9])
        sample_triton(logits, torch.ones(3), numbers, numbers, top_k, top_p)
        gather_logprobs_triton(logits, numbers, 5)
    assert not report.findings, report


def test_a_stale_block_table_is_named_by_request_step_and_block() -> None:
    """The second request's table still points to a block that now belongs to the first."""
    case = make_attention_case([1, 1], [40, 40])
    books = owners(case)
    write_kv(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    theirs = int(case.metadata.block_table[0, 1])
    case.metadata.block_table[1, 1] = theirs
    with guard(books) as report:
        paged_attention_triton(case.query, case.kv_cache, case.metadata, case.scale)
    assert {f.kind for f in report.findings} == {"foreign block"}
    assert f"step 17: request cmpl-1 does not own block {theirs}" in str(report)


def test_a_wrong_slot_mapping_is_out_of_bounds() -> None:
    """Far outside: the process survives, and the store is left out."""
    case = make_attention_case([1], [5])
    case.metadata.slot_mapping[0] = 10**7
    with guard() as report:
        triton_attention(case.query, case.key, case.value, case.kv_cache, case.metadata, case.scale, None, None)
    assert ("out of bounds", "_write_kv") in {(f.kind, f.kernel) for f in report.findings}
