"""The judge of exercise 6: write into a small cache, then ask which positions each token has read, then compare numbers."""

from __future__ import annotations

from types import ModuleType

import torch
from attention_batch import (
    Batch,
    batches,
    check_reads,
    check_shape,
    close,
    decode,
    name,
    plural,
    probe_tensors,
    random_tensors,
    shown,
)
from hypothesis import given, strategies as st
from judging import Judge
from torch import Tensor

from stage04_kernels.paged_attention import paged_attention_torch

judge = Judge(6)


@judge.settings(40)
@given(slots=st.lists(st.integers(0, 5), unique=True, max_size=4), padding=st.integers(0, 2), heads=st.integers(1, 2))
def test_the_cache_is_written(impl: ModuleType, slots: list[int], padding: int, heads: int) -> None:
    mapping = slots + [-1] * padding
    keys = torch.arange(1.0, 1 + len(mapping)).view(-1, 1, 1).repeat(1, heads, 1)
    cache = torch.zeros(2, 3, 2, heads, 1)
    how = (
        f"3 blocks of 2, {heads} {plural(heads, 'head')}, all zeros; row i brings the key i + 1 and the value -(i + 1)"
    )
    with judge.case(slot_mapping=mapping, cache=how):
        impl.write_kv(keys, -keys, cache, torch.tensor(mapping, dtype=torch.int64))
        for slot in sorted(range(6), key=lambda slot: slot not in slots):
            check_slot(slot, mapping.index(slot) + 1.0 if slot in slots else 0.0, cache)


def check_slot(slot: int, key: float, cache: Tensor) -> None:
    """Every head of the slot holds this key and its negative as value; 0 is what was there before."""
    what = f"slot {slot} (block {slot // 2}, offset {slot % 2})"
    keys, values = cache[:, slot // 2, slot % 2, :, 0].tolist()
    right = all(each == key for each in keys) and all(each == -key for each in values)
    expected = f"{what} with key {key:g} and value {-key:g}" if key else f"{what} as it was"
    judge.holds("written" if key else "kept", right, expected, f"in its heads keys {keys}, values {values}")


@judge.settings(60)
@given(batch=batches())
def test_who_sees_what(impl: ModuleType, batch: Batch) -> None:
    with judge.case(batch=batch):
        query, cache = probe_tensors(batch)
        result = impl.paged_attention_torch(query, cache, batch.metadata(), 1.0, batch.window)
        check_shape(judge, result, query)
        check_reads(judge, batch, result)


@judge.settings(60)
@given(batch=batches())
def test_the_numbers(impl: ModuleType, batch: Batch) -> None:
    compare(impl, batch, *random_tensors(batch), scale=0.5)


@judge.settings(20)
@given(batch=batches(most_requests=2), sign=st.sampled_from([1, -1]))
def test_what_is_hidden_weighs_nothing(impl: ModuleType, batch: Batch, sign: int) -> None:
    """However large its score: each position's is 100,000 above, or below, the one before."""
    query, cache = probe_tensors(batch)
    query[..., 0] = 1.0
    for request in range(len(batch.requests)):
        for position, slot in enumerate(batch.slots(request)):
            cache[0, slot // batch.block_size, slot % batch.block_size, :, 0] = sign * 1e5 * position
    with judge.case(batch=batch, score=f"{sign * 100_000} times the position of the key"):
        result = impl.paged_attention_torch(query, cache, batch.metadata(), 1.0, batch.window)
        check_shape(judge, result, query)
        for row, (request, position) in enumerate(batch.rows()):
            visible = batch.visible(position)
            right = visible[-1] if sign > 0 else visible[0]
            found = [batch.owner(slot) for slot in decode(batch, result[row, 0]).weights]
            with judge.case(row=f"{row}: the token of {name(request)} at position {position}"):
                key = "causal" if sign > 0 else "window"
                judge.equal(key, f"all from position {right} of {name(request)}", f"all from {', '.join(found)}")


@judge.settings(15)
@given(batch=batches(most_requests=1))
def test_large_scores(impl: ModuleType, batch: Batch) -> None:
    compare(impl, batch, *random_tensors(batch, size=30.0), scale=1.0, key="softmax")


@judge.settings(15)
@given(batch=batches(most_requests=2))
def test_another_number_format(impl: ModuleType, batch: Batch) -> None:
    compare(impl, batch, *random_tensors(batch, dtype=torch.bfloat16), scale=0.5)


def compare(impl: ModuleType, batch: Batch, query: Tensor, cache: Tensor, scale: float, key: str = "reference") -> None:
    """The result, and what must not change, against the reference's."""
    metadata, given_query, given_cache = batch.metadata(), query.clone(), cache.clone()
    rows = sum(new for _, new in batch.requests)
    with judge.case(batch=batch, numbers=f"random, scale {scale}, {query.dtype}; NaN in every slot that is nobody's"):
        got = impl.paged_attention_torch(given_query, given_cache, metadata, scale, batch.window)
        check_shape(judge, got, query)
        got, expected = got.float(), paged_attention_torch(query, cache, batch.metadata(), scale, batch.window).float()
        judge.holds(
            "softmax" if key == "softmax" else "nan", not got[:rows].isnan().any(), "numbers", f"NaN: {shown(got)}"
        )
        judge.holds("padding", not got[rows:].any(), f"zeros in the rows from {rows} on", shown(got[rows:]))
        if not close(got, expected, query.dtype):
            other = paged_attention_torch(query, cache, batch.metadata(), query.shape[2] ** -0.5, batch.window)
            wrong_scale = close(got, other.float(), query.dtype) and key == "reference"
            judge.rejects("scale" if wrong_scale else key, shown(expected), shown(got))
        same = torch.equal(given_query, query) and torch.equal(given_cache.nan_to_num(), cache.nan_to_num())
        same &= torch.equal(given_cache.isnan(), cache.isnan())
        tensors = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        same &= all(torch.equal(getattr(metadata, each), getattr(batch.metadata(), each)) for each in tensors)
        judge.holds("unchanged", same, "the arguments as they were", "others")
