"""Batch-invariant attention: a row's bits depend on its query and its context only."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from stage04_kernels.attention import AttentionMetadata, get_backend
from stage04_kernels.backends.batch_invariant import ROWS, SPLIT, paged_attention_batch_invariant, rows_of
from stage04_kernels.lab.cases import AttentionCase, make_attention_case, make_metadata
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.sampler import exponential_noise, gather_logprobs

batches = st.lists(
    st.tuples(st.integers(1, 2 * ROWS + 3), st.one_of(st.integers(0, 3 * SPLIT), st.sampled_from([SPLIT - 1, SPLIT]))),
    min_size=1,
    max_size=7,
)
heads = st.sampled_from([(4, 4), (4, 2), (3, 1)])


def one_token_each(case: AttentionCase, request: int) -> AttentionMetadata:
    """The same tokens of one request, as decodes."""
    metadata = case.metadata
    start, end = metadata.query_start_loc_cpu[request : request + 2]
    lengths = list(range(metadata.seq_lens_cpu[request] - (end - start) + 1, metadata.seq_lens_cpu[request] + 1))
    table = metadata.block_table[request].tolist()
    return make_metadata([1] * (end - start), lengths, [table] * (end - start), case.kv_cache.shape[2])


@given(
    batches,
    heads,
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.one_of(st.none(), st.integers(1, 2 * SPLIT)),
    st.integers(0, 99),
)
def test_the_bits_of_a_row_are_the_same_in_any_company(batch, heads, dtype, window, seed) -> None:
    case = make_attention_case(
        [q for q, _ in batch], [c for _, c in batch], num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, seed=seed
    )
    arguments = (case.query, case.key, case.value, case.kv_cache, case.metadata, case.scale)
    together = get_backend("batch_invariant")(*arguments, window)
    for request, (start, end) in enumerate(pairwise(case.metadata.query_start_loc_cpu)):
        alone = paged_attention_batch_invariant(
            case.query[start:end], case.kv_cache, one_token_each(case, request), case.scale, window
        )
        assert torch.equal(together[start:end], alone)
        last = paged_attention_batch_invariant(
            case.query[end - 1 : end],
            case.kv_cache,
            make_metadata(
                [1], [case.metadata.seq_lens_cpu[request]], [case.metadata.block_table[request].tolist()], 16
            ),
            case.scale,
            window,
        )
        assert torch.equal(together[end - 1 : end], last)


@pytest.mark.parametrize("window", [1, 5, SPLIT, 100])
def test_a_window_hides_what_is_before_it(window: int) -> None:
    case = make_attention_case([1, 20, 3], [150, 0, 90])
    get_backend("torch")(case.query, case.key, case.value, case.kv_cache, case.metadata, case.scale)
    got = paged_attention_batch_invariant(case.query, case.kv_cache, case.metadata, case.scale, window)
    keys, values = case.kv_cache.view(2, -1, *case.kv_cache.shape[3:])
    requests, visible = rows_of(case.metadata)
    heads_per_kv_head = case.query.shape[1] // keys.shape[1]
    for row, (request, length) in enumerate(zip(requests.tolist(), visible.tolist())):
        table = case.metadata.block_table[request].tolist()
        slots = [table[p // 16] * 16 + p % 16 for p in range(max(0, length - window), length)]
        for head in range(case.query.shape[1]):
            weights = (keys[slots, head // heads_per_kv_head] @ case.query[row, head] * case.scale).softmax(0)
            wanted = weights @ values[slots, head // heads_per_kv_head]
            tolerance = TOLERANCES[torch.float32]
            torch.testing.assert_close(got[row, head], wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("vocab", [7, 777, 2048])
def test_noise_and_logprobs_of_a_row_do_not_depend_on_the_others(vocab: int) -> None:
    logits = 3 * torch.randn(13, vocab, generator=torch.Generator().manual_seed(0))
    seeds, positions, device = list(range(13)), list(range(13)), torch.device("cpu")
    noise = exponential_noise(seeds, positions, vocab, device)
    tokens = logits.argmax(dim=-1)
    logprobs = gather_logprobs(logits, tokens, 5)[1]
    for row in range(13):
        assert torch.equal(exponential_noise([row], [row], vocab, device)[0], noise[row])
        assert torch.equal(gather_logprobs(logits[[row]], tokens[[row]], 5)[1][0], logprobs[row])
