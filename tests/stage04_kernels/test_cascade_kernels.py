"""Cascade attention: which requests read their first blocks together, and that the parts merge to what one pass gives."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_guard import BlockOwners, guard

from stage04_kernels.backends.reference import paged_attention_reference
from stage04_kernels.features.cascade_attention.plan import (
    CascadePlan,
    SharedPrefix,
    cascade_attention_torch,
    find_shared_prefixes,
    make_plan,
    saved_bytes,
)
from stage04_kernels.features.cascade_attention.triton_kernels import cascade_attention_triton
from stage04_kernels.lab.cases import AttentionCase, make_attention_case
from stage04_kernels.lab.check_triton import tile_choices
from stage04_kernels.paged_attention import write_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def filled(case: AttentionCase) -> AttentionCase:
    write_kv(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    return case


def computed_of(case: AttentionCase) -> np.ndarray:
    lens = [end - start for start, end in pairwise(case.metadata.query_start_loc_cpu)]
    return np.array(case.metadata.seq_lens_cpu) - np.array(lens)


def plan_of(case: AttentionCase, min_requests: int = 2, min_tokens: int = 1) -> CascadePlan | None:
    table, block_size = case.metadata.block_table.numpy(), case.kv_cache.shape[2]
    prefixes = find_shared_prefixes(table, computed_of(case), block_size, min_requests, min_tokens)
    return make_plan(prefixes, table, case.metadata, block_size) if prefixes else None


def allowed(case: AttentionCase, plan: CascadePlan) -> float:
    """How far two orders of the sum may be apart: the bound that triton_kernels.py states."""
    size = float(case.kv_cache.nan_to_num(nan=0.0)[1].float().abs().max())
    if case.query.dtype != torch.float32:
        return 2.0 ** (-7 if case.query.dtype == torch.bfloat16 else -10) * size
    real = case.kv_cache.nan_to_num(nan=0.0)[0]
    scores = case.scale * float(case.query.norm(dim=-1).max()) * float(real.norm(dim=-1).max())
    return 4 * (scores + math.log(case.metadata.max_seq_len) + 8) * 2.0**-24 * size


@st.composite
def shared_cases(draw: st.DrawFn) -> AttentionCase:
    """Any step: some requests share blocks, some few, some none; chunks of prompts and decodes, padding rows."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    request = st.tuples(st.one_of(st.just(1), st.integers(1, 12)), st.integers(0, 70))
    requests = draw(st.lists(request, min_size=2, max_size=9))
    kv_heads = draw(st.sampled_from([1, 2]))
    return filled(
        make_attention_case(
            [query_len for query_len, _ in requests],
            [computed for _, computed in requests],
            num_heads=kv_heads * draw(st.sampled_from([1, 3, 4])),
            num_kv_heads=kv_heads,
            head_dim=draw(st.sampled_from([16, 20, 64])),
            block_size=block_size,
            dtype=draw(st.sampled_from(DTYPES)),
            num_shared=draw(st.integers(1, 70 // block_size)),
            num_padding=draw(st.integers(0, 3)),
            seed=draw(st.integers(0, 1000)),
        )
    )


@given(case=shared_cases())
def test_the_twin_computes_what_one_pass_computes(case: AttentionCase) -> None:
    if (plan := plan_of(case)) is None:
        return
    one_pass = paged_attention_reference(case.query, case.kv_cache, case.metadata, case.scale)
    merged = cascade_attention_torch(case.query, case.kv_cache, plan, case.scale)
    assert float((merged.float() - one_pass.float()).abs().max()) <= allowed(case, plan)


@settings(max_examples=settings().max_examples // 4)
@given(case=shared_cases(), tiles=st.sampled_from(tile_choices()))
def test_the_kernels_compute_what_the_twin_computes(case: AttentionCase, tiles: object) -> None:
    if (plan := plan_of(case)) is None:
        return
    fast = cascade_attention_triton(case.query, case.kv_cache, plan, case.scale, tiles=tiles)  # type: ignore[arg-type]
    slow = cascade_attention_torch(case.query, case.kv_cache, plan, case.scale)
    assert fast.isfinite().all() and not fast[case.metadata.query_start_loc_cpu[-1] :].any()
    assert float((fast.float() - slow.float()).abs().max()) <= allowed(case, plan)


@given(data=st.data())
def test_what_is_found_is_shared_and_comes_before_every_query_token(data: st.DataObject) -> None:
    """Block tables as a prefix cache makes them: those of a few ancestors, which part somewhere."""
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    width = 12
    ancestors = [list(range(100 * n, 100 * n + width)) for n in range(1, 4)]
    tables, computed = [], []
    for number in range(data.draw(st.integers(1, 14))):
        parts = data.draw(st.integers(0, width))
        own = [10_000 + width * number + n for n in range(width)]
        tables.append(data.draw(st.sampled_from(ancestors))[:parts] + own[parts:])
        computed.append(data.draw(st.integers(0, width * block_size - 1)))
    table = np.array(tables, dtype=np.int32)
    least, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5 * block_size))
    found = find_shared_prefixes(table, np.array(computed), block_size, least, tokens)
    members = [request for prefix in found for request in prefix.requests]
    assert len(members) == len(set(members))
    for prefix in found:
        assert len(prefix.requests) >= max(2, least) and prefix.num_blocks * block_size >= tokens
        first = table[prefix.requests[0], : prefix.num_blocks]
        assert all((table[r, : prefix.num_blocks] == first).all() for r in prefix.requests)
        assert all(prefix.num_blocks * block_size <= computed[r] for r in prefix.requests)
    # and nothing is overlooked: what is left over has no group that would do
    for first in (left := [r for r in range(len(tables)) if r not in members]):
        need = -(-tokens // block_size)
        able = [r for r in left if computed[r] // block_size >= need and tables[r][:need] == tables[first][:need]]
        assert len(able) < max(2, least)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([8] * 8, (list(range(8)), 8)),  # all share all
        ([8] * 8 + [2], (list(range(8)), 8)),  # one that shares little shortens nobody's prefix
        ([8] * 8 + [7] * 8, (list(range(16)), 7)),  # 15 x 7 saves more than 7 x 8
        ([8] * 7, None),
    ],
)
def test_the_group_that_saves_most_is_chosen(lengths: list[int], expected: tuple[list[int], int] | None) -> None:
    table = np.array(
        [list(range(1, n + 1)) + [100 * r + n for n in range(n, 9)] for r, n in enumerate(lengths, 1)], dtype=np.int32
    )
    found = find_shared_prefixes(table, np.full(len(lengths), 128), 16, min_tokens=100)
    assert found[:1] == ([SharedPrefix(*expected)] if expected else [])
    if expected:
        assert saved_bytes(found[:1], 1000) == (len(expected[0]) - 1) * expected[1] * 1000


@pytest.mark.parametrize("size_of_family", [1, 7, 8])
def test_requests_that_share_too_little_cost_nothing(size_of_family: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a look at each: the host searches in every step. A table with too few columns is no error."""
    searches, sort = 0, np.argsort

    def counting(*given: Any, **how: Any) -> Any:
        nonlocal searches
        searches += 1
        return sort(*given, **how)

    monkeypatch.setattr(np, "argsort", counting)
    family, column = np.mgrid[0:224, 0:20]
    table = (family // size_of_family * 20 + column).astype(np.int32)
    found = find_shared_prefixes(table, np.full(224, 320), 16)
    assert len(found) == searches == (28 if size_of_family == 8 else 0)
    assert find_shared_prefixes(table[:, :3], np.full(224, 48), 16) == []


def test_two_families_of_requests_have_a_prefix_each() -> None:
    table = np.array([[1, 2, 3], [7, 8, 9], [1, 2, 4], [7, 8, 5]], dtype=np.int32)
    found = find_shared_prefixes(table, np.full(4, 40), 16, 2, 16)
    assert found == [SharedPrefix([0, 2], 2), SharedPrefix([1, 3], 2)]


def test_no_memory_is_read_that_a_request_does_not_own() -> None:
    """Of a prefix too, which is read for several; a prefix of one block more than one of them shares is noticed."""
    case = filled(make_attention_case([1, 9, 1, 1], [64, 50, 49, 20], num_shared=3, num_padding=2, block_size=16))
    owned = [{int(block) for block in row if block >= 0} for row in case.metadata.block_table]
    books = BlockOwners(owned, list("abcd"), 1, case.metadata.query_start_loc_cpu)
    plan = plan_of(case)
    assert plan is not None and plan.prefixes == [SharedPrefix([0, 1, 2], 3)]
    with guard(books) as report:
        out = cascade_attention_triton(case.query, case.kv_cache, plan, case.scale)
    assert not report.findings, report
    one_pass = paged_attention_reference(case.query, case.kv_cache, case.metadata, case.scale)
    assert float((out - one_pass).abs().max()) <= allowed(case, plan)
    wrong = make_plan([SharedPrefix([0, 1, 2, 3], 3)], case.metadata.block_table.numpy(), case.metadata, 16)
    with guard(books) as report:
        cascade_attention_triton(case.query, case.kv_cache, wrong, case.scale)
    assert {(f.kind, f.kernel) for f in report.findings} >= {("foreign block", "_attend_shared_prefix")}
    assert "request d does not own block" in str(report)
