"""A KV cache of 8 bits: what rounding may change, where codes and scales lie, and every path against the slow twin."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from stage04_kernels.attention import AttentionBackend
from stage04_kernels.backends.native import library
from stage04_kernels.backends.reference import reference_attention, write_kv_reference
from stage04_kernels.features.kv_cache_8bit.attention import choose_attention, through_a_copy
from stage04_kernels.features.kv_cache_8bit.cache import (
    as_stored,
    codes_of,
    dequantize,
    quantize,
    read_blocks,
    scales_of,
    write_kv_8bit,
)
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS, KVFormat
from stage04_kernels.features.rope import rope_cos_sin, rope_frequencies
from stage04_kernels.lab.cases import AttentionCase, make_attention_case
from stage04_kernels.lab.tolerances import TOLERANCES

NATIVE = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
STEPS = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
"""Half the distance to the next code, as a share of the number; int8's is a share of the largest."""
LEAST = {"int8": 0.5, "float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}
"""Half the distance between the smallest codes."""
formats = st.sampled_from(sorted(FORMATS)).map(FORMATS.__getitem__)
numbers = st.one_of(
    st.just(0.0), *(st.floats(-most, most, width=32) for most in (2.0**127, 2.0**-120, 2.0**-140, 500.0))
)
heads = st.lists(numbers, min_size=4, max_size=12).map(torch.tensor)


def empty(shape: tuple[int, ...], kv_format: KVFormat) -> Tensor:
    """A cache like the one of numbers that has this shape. What nobody wrote is 0xff: NaN, in a scale and in fp8."""
    return torch.full((*shape[:-1], kv_format.head_bytes(shape[-1])), 0xFF, dtype=torch.uint8)


# One head of one token


@given(formats, heads)
def test_no_number_is_wrong_by_more_than_half_a_step(kv_format: KVFormat, x: Tensor) -> None:
    codes, scale = quantize(x, kv_format)
    found = dequantize(codes, scale, kv_format, torch.float32).double()
    step = 1.0 if scale is None else float(scale)
    wanted = x.double() if scale is not None else x.double().clamp(-kv_format.largest, kv_format.largest)
    allowed = torch.maximum(STEPS[kv_format.dtype] * wanted.abs(), torch.tensor(LEAST[kv_format.dtype] * step))
    assert ((found - wanted).abs() <= allowed * 1.0001 + 2.0**-126 * kv_format.largest * (scale is not None)).all()
    assert (found[x == 0] == 0).all()


def test_a_step_as_coarse_as_it_may_be_is_used_in_full() -> None:
    """The bound above is no empty one: this number is wrong by half a step."""
    int8 = FORMATS["int8_per_token_head"]
    assert as_stored(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5]), int8).tolist() == [127, 0, 2, 2, 0]
    assert as_stored(torch.tensor([17.0, 1000.0, -1000.0]), FORMATS["fp8_e4m3"]).tolist() == [16, 448, -448]
    assert as_stored(torch.tensor([9.0, 1e6, -1e6]), FORMATS["fp8_e5m2"]).tolist() == [8, 57344, -57344]


def test_one_large_number_costs_its_head_and_no_other() -> None:
    x = torch.full((2, 2, 8), 0.01)
    x[0, 1, 3] = 1000.0
    found = as_stored(x, FORMATS["int8_per_token_head"])
    assert found[0, 1].count_nonzero() == 1 and found[0, 1, 3] == 1000
    for token, head in ((0, 0), (1, 0), (1, 1)):
        torch.testing.assert_close(found[token, head], x[token, head])


@given(formats, heads, st.sampled_from([torch.nan, torch.inf]))
def test_what_is_no_number_stays_none(kv_format: KVFormat, x: Tensor, broken: float) -> None:
    x[1] = broken
    found = as_stored(x, kv_format)
    assert found[1].isnan() or (not kv_format.has_scales and found[1] == kv_format.largest)
    assert found.isnan().sum() in (0, 1, len(x))


@given(formats, heads)
def test_what_was_stored_is_stored_again_unchanged(kv_format: KVFormat, x: Tensor) -> None:
    """The twin hands the backend a token's own key as it is stored."""
    once = as_stored(x, kv_format)
    torch.testing.assert_close(as_stored(once, kv_format), once, rtol=1e-6, atol=1e-36)


# Blocks


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(16, 3, 8), (1, 1, 4), (4, 2, 5)])
def test_written_slot_by_slot_and_moved_block_by_block(
    name: str, block_size: int, kv_heads: int, head_dim: int
) -> None:
    kv_format, num_blocks = FORMATS[name], 5
    cache = empty((2, num_blocks, block_size, kv_heads, head_dim), kv_format)
    plain = torch.zeros(2, num_blocks, block_size, kv_heads, head_dim)
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([block_size, 3 * block_size - 1, -1, 0])
    key, value = torch.randn(2, len(slots), kv_heads, head_dim, generator=generator) * 3
    write_kv_8bit(key, value, cache, slots, kv_format)
    write_kv_reference(as_stored(key, kv_format), as_stored(value, kv_format), plain, slots)
    moved = empty((2, num_blocks, block_size, kv_heads, head_dim), kv_format)
    for block in range(num_blocks):  # as swapping does
        moved[:, num_blocks - 1 - block].copy_(cache[:, block])
    found = read_blocks(moved, torch.arange(num_blocks - 1, -1, -1), kv_format, torch.float32)
    for slot in slots[slots >= 0].tolist():
        block, offset = divmod(slot, block_size)
        assert torch.equal(found[:, block, offset], plain[:, block, offset])
    assert (cache != 0xFF).sum() <= 2 * 3 * kv_heads * kv_format.head_bytes(head_dim), "nothing else was written"
    assert codes_of(cache, kv_format).shape == plain.shape
    scales = scales_of(cache, kv_format)
    assert scales is None or scales.shape == plain.shape[:-1]


# Attention

batches = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4)
decodes = st.lists(st.tuples(st.just(1), st.integers(60, 150)), min_size=4, max_size=6)  # what they share is read once
cases = st.builds(
    lambda batch, shared, heads, dim, block, pad, window, dtype, seed: make_attention_case(
        [query for query, _ in batch], [before for _, before in batch], num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim,
        block_size=block, num_shared=shared, num_padding=pad, window=window, dtype=dtype, seed=seed,
    ),
    batches | decodes, st.sampled_from([0, 8, 80]), st.sampled_from([(4, 4), (6, 2), (3, 1)]), st.sampled_from([4, 16, 20, 64]), st.sampled_from([1, 4, 16]),
    st.integers(0, 2), st.sampled_from([None, None, 7]), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99),
)  # fmt: skip


def coded(case: AttentionCase, kv_format: KVFormat) -> tuple[AttentionCase, AttentionCase]:
    """(the case over codes, the same over the numbers that they stand for). What nobody wrote is NaN in both, where there is such a code."""
    plain = case.kv_cache
    cache = empty(tuple(plain.shape), kv_format)
    slots = torch.arange(plain.shape[1] * plain.shape[2])
    slots[plain[0, ..., 0, 0].flatten().isnan()] = -1
    write_kv_8bit(*plain.flatten(1, 2).unbind(), cache, slots, kv_format)
    stored = [as_stored(x, kv_format) for x in (case.key, case.value, plain)]
    return replace(case, kv_cache=cache), replace(case, key=stored[0], value=stored[1], kv_cache=stored[2])


def run(attention: AttentionBackend, case: AttentionCase, rotates: bool = False) -> Tensor:
    tokens = torch.arange(len(case.query))
    rotation = rope_cos_sin(tokens, rope_frequencies(case.query.shape[2], 1e4)) if rotates else None
    case.metadata.plans.clear()
    return attention(case.query, case.key, case.value, case.kv_cache, case.metadata, case.scale, case.window, rotation)


@given(cases, formats)
def test_the_copy_is_attention_over_the_stored_numbers(case: AttentionCase, kv_format: KVFormat) -> None:
    codes, stored = coded(case, kv_format)
    found = run(through_a_copy(reference_attention, kv_format), codes)
    wanted = run(reference_attention, stored)
    assert torch.equal(found, wanted)
    assert_written(codes, stored, kv_format)


def assert_written(codes: AttentionCase, stored: AttentionCase, kv_format: KVFormat) -> None:
    """The step's own keys and values lie in their slots."""
    found = read_blocks(codes.kv_cache, torch.arange(codes.kv_cache.shape[1]), kv_format, stored.key.dtype).flatten(
        1, 2
    )
    slots = codes.metadata.slot_mapping
    for side, x in enumerate((stored.key, stored.value)):
        assert torch.equal(found[side][slots[slots >= 0]], x[slots >= 0])


@NATIVE
@given(cases, formats, st.booleans())
def test_the_compiled_path_is_the_compiled_backend_over_the_copy(
    case: AttentionCase, kv_format: KVFormat, rotates: bool
) -> None:
    """In float32 to the last bit, what is written and what comes out."""
    from stage04_kernels.backends.native.attention import native_attention
    from stage04_kernels.features.kv_cache_8bit.native import native_attention_8bit

    codes, _ = coded(case, kv_format)
    slow = replace(codes, kv_cache=codes.kv_cache.clone())
    twin = through_a_copy(native_attention, kv_format)
    found, wanted = run(native_attention_8bit(twin, kv_format), codes, rotates), run(twin, slow, rotates)
    assert torch.equal(codes.kv_cache, slow.kv_cache)
    if case.query.dtype == torch.float32:
        assert torch.equal(found, wanted)
    allowed = TOLERANCES[case.query.dtype]
    torch.testing.assert_close(found, wanted, atol=allowed.atol, rtol=allowed.rtol)


@pytest.mark.slow(keep=("native", "int8_per_token_head", "fp8_e5m2"))
@pytest.mark.parametrize("backend", [pytest.param("native", marks=NATIVE), "triton-interpret"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_and_the_way_to_it_is_torchs(name: str, backend: str) -> None:
    """All codes, all numbers half-way between two of them, those beside these, and broken ones: written by native.cpp and by Triton."""
    kv_format = FORMATS[name]
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kv_format.dtype)).float()
    every = every[every.isfinite()].sort().values
    between = (every[1:] + every[:-1]) / 2
    beside = [torch.nextafter(between, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    x = torch.cat([every, between, *beside, torch.tensor([1e30, -1e30, 1e-40, torch.nan, torch.inf, -torch.inf])])
    if kv_format.has_scales:  # 1 if a head holds this one; and what a scale cannot hold
        x = torch.cat([torch.full((len(x), 1), kv_format.largest), x[:, None].expand(-1, 3)], dim=1)
        x = torch.cat([x, x * 1e-41, x * 3e-37, x * 1e33])
    else:
        x = x[:, None].expand(-1, 4)
    heads = 64  # of a token
    x = torch.cat([x, torch.zeros(-len(x) % heads, 4)]).view(-1, heads, 4)
    case = make_attention_case([len(x)], [0], num_heads=heads, num_kv_heads=heads, head_dim=4)
    case = replace(case, key=x, value=-x, kv_cache=empty(tuple(case.kv_cache.shape), kv_format))
    slow = case.kv_cache.clone()
    path, attention = choose_attention(reference_attention, backend, kv_format)
    run(attention, case)
    write_kv_8bit(case.key, case.value, slow, case.metadata.slot_mapping, kv_format)
    found, wanted = (
        read_blocks(each, torch.arange(each.shape[1]), kv_format, torch.float32) for each in (case.kv_cache, slow)
    )
    assert path == backend
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@given(cases, formats, st.data())
def test_a_row_does_not_depend_on_its_chunk(case: AttentionCase, kv_format: KVFormat, data: st.DataObject) -> None:
    """The tokens of a request, in one step or token by token, leave the same codes."""
    codes, _ = coded(case, kv_format)
    whole, parts = codes.kv_cache.clone(), codes.kv_cache.clone()
    slots = case.metadata.slot_mapping
    write_kv_8bit(case.key, case.value, whole, slots, kv_format)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(slots)), max_size=4)) | {0, len(slots)})
    for start, end in pairwise(cuts):
        write_kv_8bit(case.key[start:end], case.value[start:end], parts, slots[start:end], kv_format)
    assert torch.equal(whole, parts)


# Triton, interpreted


@settings(max_examples=settings().max_examples // 3)
@given(cases, formats, st.sampled_from([1, 1, 4]), st.sampled_from(["wide", "narrow"]))
def test_the_interpreted_kernels_are_the_twin(
    case: AttentionCase, kv_format: KVFormat, num_splits: int, tiles: str
) -> None:
    from stage04_kernels.features.kv_cache_8bit import triton_kernels
    from stage04_kernels.triton_kernels.paged_attention import paged_attention_triton
    from stage04_kernels.triton_kernels.tiles import ATTENTION_TILES

    codes, _ = coded(case, kv_format)
    slow = replace(codes, kv_cache=codes.kv_cache.clone())
    wanted = run(through_a_copy(reference_attention, kv_format), slow)
    triton_kernels.write_kv_8bit_triton(case.key, case.value, codes.kv_cache, case.metadata.slot_mapping, kv_format)
    assert torch.equal(codes.kv_cache, slow.kv_cache)
    found = paged_attention_triton(
        case.query, codes.kv_cache, case.metadata, case.scale, case.window, num_splits=num_splits,
        tiles=replace(ATTENTION_TILES[tiles], upcast=True), launch=partial(triton_kernels.launch_8bit, kv_format=kv_format),
    )  # fmt: skip
    allowed = TOLERANCES[case.query.dtype]
    torch.testing.assert_close(found, wanted, atol=allowed.atol, rtol=allowed.rtol)
