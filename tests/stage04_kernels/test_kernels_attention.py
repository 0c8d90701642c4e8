"""Paged attention and the KV write: the fast paths against the oracle, and the oracle against dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from stage04_kernels.attention import BACKENDS, get_backend, resolve_backend
from stage04_kernels.backends.native import library
from stage04_kernels.backends.reference import paged_attention_reference, write_kv_reference
from stage04_kernels.lab.cases import AttentionCase, make_attention_case, make_metadata
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.paged_attention import gather_plan, group_by_length, paged_attention_torch, write_kv

ABSENT = {"triton"} | ({"native"} if library.problem() else set())  # the first is triton-interpret on a GPU
RUNNABLE = [name for name in BACKENDS if name not in ABSENT]
FAST_BACKENDS = [name for name in RUNNABLE if name != "reference"]
DTYPES = list(TOLERANCES)


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    """Any mixed batch in any order: chunks and decodes, contexts around block edges, blocks shared or not."""
    block_size = draw(st.sampled_from([1, 2, 8, 16]))
    near_edge = st.integers(0, 4).flatmap(lambda n: st.sampled_from([n * block_size + d for d in (-1, 0, 1)]))
    length = st.one_of(near_edge.map(lambda n: max(n, 0)), st.integers(0, 50))
    request = st.tuples(st.one_of(st.just(1), st.integers(1, 20)), length)
    requests = draw(st.lists(request, min_size=1, max_size=6))
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    return make_attention_case(
        [query_len for query_len, _ in requests],
        [computed for _, computed in requests],
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([4, 16, 20, 64])),
        block_size=block_size,
        dtype=draw(st.sampled_from(DTYPES)),
        num_shared=draw(st.integers(0, 3)),
        num_padding=draw(st.integers(0, 3)),
        window=draw(st.none() | st.integers(1, 70)),
        seed=draw(st.integers(0, 2**32)),
    )


def run(case: AttentionCase, backend: str) -> torch.Tensor:
    """Call the backend on a copy of the cache."""
    arguments = (case.query, case.key, case.value, case.kv_cache.clone(), case.metadata, case.scale)
    return get_backend(backend)(*arguments, case.window)


def assert_close(fast: torch.Tensor, slow: torch.Tensor) -> None:
    tolerance = TOLERANCES[slow.dtype]
    torch.testing.assert_close(fast, slow, atol=tolerance.atol, rtol=tolerance.rtol)


def backend_equals_the_oracle(backend: str, case: AttentionCase) -> None:
    """Slots that the requests do not own hold NaN, so one that is read anywhere turns the comparison red."""
    slow = run(case, "reference")
    assert not slow.isnan().any()
    assert_close(run(case, backend), slow)


@pytest.mark.parametrize("backend", [name for name in FAST_BACKENDS if name != "triton-interpret"])
@given(case=attention_cases())
def test_backend_equals_the_oracle(backend: str, case: AttentionCase) -> None:
    backend_equals_the_oracle(backend, case)


@settings(max_examples=settings().max_examples // 2)
@given(case=attention_cases())
def test_the_triton_kernels_equal_the_oracle(case: AttentionCase) -> None:
    """Fewer examples: the interpreter takes its time. The rest of the grid is in `python -m stage04_kernels check`."""
    backend_equals_the_oracle("triton-interpret", case)


@given(query_len=st.integers(1, 20), seed=st.integers(0, 1000), kv_heads=st.sampled_from([1, 2, 4]))
def test_oracle_equals_dense_causal_attention(query_len: int, seed: int, kv_heads: int) -> None:
    """A whole prompt needs no cache: torch's own causal attention over its keys and values must agree."""
    case = make_attention_case([query_len], [0], num_heads=4, num_kv_heads=kv_heads, block_size=8, seed=seed)
    q, k, v = (t.transpose(0, 1)[None] for t in (case.query, case.key, case.value))
    k, v = (t.repeat_interleave(4 // kv_heads, dim=1) for t in (k, v))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=case.scale)[0].transpose(0, 1)
    assert_close(run(case, "reference"), dense)


@pytest.mark.slow(keep=("5-", "1-torch", "1-native"))
@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(backend: str, chunk: int) -> None:
    """Chunked prefill: each chunk writes its keys and sees those of the chunks before it."""
    whole = make_attention_case([37], [0], block_size=8)
    expected = run(whole, backend)
    cache, outputs = whole.kv_cache.clone(), []
    table = whole.metadata.block_table.tolist()
    for start in range(0, 37, chunk):
        end = min(start + chunk, 37)
        metadata = make_metadata([end - start], [end], table, block_size=8)
        rows = [t[start:end] for t in (whole.query, whole.key, whole.value)]
        outputs.append(get_backend(backend)(*rows, cache, metadata, whole.scale))
    assert_close(torch.cat(outputs), expected)


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_token_sees_itself_and_nothing_later(backend: str) -> None:
    """Change the last token's key and value: only the last output may change."""
    case = make_attention_case([9], [4], block_size=4)
    before = run(case, backend)
    case.key[-1] += 5.0
    case.value[-1] += 5.0
    after = run(case, backend)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1])


@pytest.mark.parametrize("backend", FAST_BACKENDS)
def test_many_decodes_of_very_different_length(backend: str) -> None:
    """More positions than one group of decodes holds, the longest neither first nor last."""
    computed = [(37 * n) % 300 for n in range(40)]
    computed[7] = 1500
    case = make_attention_case([1] * 40, computed, num_heads=2, num_kv_heads=2, head_dim=8)
    assert_close(run(case, backend), run(case, "reference"))


@given(lengths=st.lists(st.integers(1, 300), max_size=30), limit=st.integers(1, 1000))
def test_groups_of_decodes_hold_each_request_once_and_are_full(lengths: list[int], limit: int) -> None:
    """A group begins with its longest request, and takes the next one exactly when it still fits."""
    groups = group_by_length(list(range(len(lengths))), lengths, limit)
    assert sorted(request for group in groups for request in group) == list(range(len(lengths)))
    for group in groups:
        assert lengths[group[0]] == max(lengths[request] for request in group)
        assert len(group) == 1 or len(group) * lengths[group[0]] <= limit
    for group in groups[:-1]:
        assert (len(group) + 1) * lengths[group[0]] > limit


@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_request_without_tokens_in_this_step_and_padding_rows(backend: str) -> None:
    case = make_attention_case([3, 0, 1], [2, 5, 6], num_padding=2)
    output = run(case, backend)
    assert_close(output, run(case, "reference"))
    assert torch.equal(output[-2:], torch.zeros_like(output[-2:]))


@pytest.mark.parametrize("backend", [name for name in ("torch", "native") if name in RUNNABLE])
@pytest.mark.parametrize("dim", [1, 2])
def test_query_may_be_a_slice_of_a_wider_tensor(backend: str, dim: int) -> None:
    """A model cuts query, key and value out of one projection, so they are not contiguous."""
    case = make_attention_case([1, 6, 1], [3, 4, 20])
    expected = run(case, backend)
    packed = torch.cat([case.query, case.key, case.value], dim=dim)
    case.query, case.key, case.value = packed.split(case.query.shape[dim], dim=dim)
    assert not case.query.is_contiguous()
    assert torch.equal(run(case, backend), expected)


def test_one_metadata_serves_caches_of_different_block_size() -> None:
    """The plan is kept between layers, but not for a cache of another shape."""
    case = make_attention_case([1, 4], [10, 9], block_size=4)
    finer = make_attention_case([1, 4], [10, 9], block_size=2)
    run(case, "torch")
    plan = gather_plan(case.metadata, 4)
    assert gather_plan(case.metadata, 4) is plan
    case.metadata.block_table = finer.metadata.block_table
    slow = paged_attention_reference(case.query, finer.kv_cache.nan_to_num(1.0), case.metadata, 1.0)
    assert_close(paged_attention_torch(case.query, finer.kv_cache.nan_to_num(1.0), case.metadata, 1.0), slow)


def test_unknown_backend_names_the_known_ones() -> None:
    case = make_attention_case([1], [0])
    with pytest.raises(ValueError, match=r"'flash'.*auto.*torch.*reference"):
        run(case, "flash")


def test_auto_depends_on_the_device_and_a_function_of_ones_own_is_a_backend() -> None:
    compiled = "torch" if library.problem() else "native"
    assert (resolve_backend("auto"), resolve_backend("auto", "cuda")) == (compiled, "triton")
    case = make_attention_case([2], [0])
    assert torch.equal(run(case, f"{__name__}:constant"), torch.full_like(case.query, case.scale))
    with pytest.raises(AttributeError):
        run(case, f"{__name__}:no_such_function")


def constant(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """A backend of a user's own: key, value, kv_cache, metadata, scale, window, rotation."""
    return torch.full_like(query, arguments[4])


@given(data=st.data(), num_tokens=st.integers(0, 30), block_size=st.sampled_from([1, 4, 16]))
def test_write_kv_equals_its_twin_and_touches_nothing_else(
    data: st.DataObject, num_tokens: int, block_size: int
) -> None:
    """Any slots in any order, padding anywhere, all rows padding included."""
    slots = data.draw(st.permutations(range(3 * 16)))[:num_tokens]
    padded = data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    slot_mapping = torch.tensor([-1 if p else s for s, p in zip(slots, padded)], dtype=torch.int64)
    dtype = data.draw(st.sampled_from(DTYPES))
    key, value = torch.randn(2, num_tokens, 2, 4).to(dtype)
    fast = torch.arange(2 * 48 * 8).view(2, 48 // block_size, block_size, 2, 4).to(dtype)
    slow = fast.clone()
    write_kv(key, value, fast, slot_mapping)
    write_kv_reference(key, value, slow, slot_mapping)
    assert torch.equal(fast, slow)


def test_slot_is_block_times_size_plus_offset() -> None:
    cache = torch.zeros(2, 4, 16, 1, 1)
    write_kv(torch.tensor([[[5.0]]]), torch.tensor([[[7.0]]]), cache, torch.tensor([2 * 16 + 3]))
    assert cache[0, 2, 3].item() == 5.0 and cache[1, 2, 3].item() == 7.0
    assert cache.count_nonzero() == 2
