"""The counts of the roofline page, against counting one by one; and what binds is what should."""

from __future__ import annotations

from hypothesis import given, strategies as st

from stage04_kernels.lab.roofline import RATES, Work, attention_work, table, works


@given(
    st.integers(1, 12),
    st.integers(0, 20),
    st.integers(1, 3),
    st.sampled_from([(4, 4), (8, 2)]),
    st.sampled_from([8, 16]),
)
def test_attention_is_counted_right(
    query_len: int, computed: int, batch: int, heads: tuple[int, int], dim: int
) -> None:
    context = query_len + computed
    products = 0
    for token in range(query_len):
        for position in range(context):
            if position <= computed + token:
                products += 2 * dim + 2 * dim  # a score, and a weighted value: a multiplication and an addition each
    work = attention_work(query_len, context, batch, *heads, dim)
    assert work.matrix_ops == batch * heads[0] * products
    keys_and_values, rows = 2 * context * heads[1] * dim * 2, 2 * query_len * heads[0] * dim * 2
    assert work.bytes == batch * (keys_and_values + rows)


def test_decode_is_bound_by_memory_and_prefill_by_the_matrix_unit_on_every_chip() -> None:
    for chip in RATES.values():
        assert attention_work(1, 2048, 256, 32, 8, 128).bound(chip) == "memory"
        assert attention_work(2048, 2048, 8, 32, 8, 128).bound(chip) == "matrix"


def test_the_least_time_is_the_larger_of_the_two() -> None:
    chip = RATES["h200"]
    assert Work("k", "s", bytes=4.8e12).seconds(chip) == 1.0
    assert Work("k", "s", bytes=4.8e12, matrix_ops=2 * 989e12).seconds(chip) == 2.0
    assert len(list(table(chip))) == len(list(works())) + 1
