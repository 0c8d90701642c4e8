"""The sampler: each transform against its definition and its slow twin, and what a draw may depend on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stage03_engine.core.features.logits_rules.logits_rules import RequestRules, make_rules
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.lab import sampler_reference as reference
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.sampler import (
    SamplingMetadata,
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    exponential_noise,
    gather_logprobs,
    random_words,
    sample,
    sample_random,
    to_device,
)

FLOAT32 = TOLERANCES[torch.float32]
ROUNDING = 1e-5  # of a sum of float32 probabilities

# Few different values, so that ties are common; wide enough that some probabilities vanish.
logit = st.one_of(st.integers(-4, 4).map(float), st.floats(-50, 50, width=32))


@st.composite
def logit_rows(draw: st.DrawFn) -> torch.Tensor:
    """Logits [num_rows, vocab]."""
    vocab = draw(st.integers(1, 40))
    rows = draw(st.lists(st.lists(logit, min_size=vocab, max_size=vocab), min_size=1, max_size=5))
    return torch.tensor(rows, dtype=torch.float32)


def metadata_of(num_rows: int, **settings: Any) -> SamplingMetadata:
    """Plain sampling at temperature 1, except for the given settings: one value for all rows, or a list."""
    defaults: dict[str, Any] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0,
    }  # fmt: skip
    max_num_logprobs = settings.pop("max_num_logprobs", None)
    lists = {k: v if isinstance(v, list) else [v] * num_rows for k, v in (defaults | settings).items()}
    return SamplingMetadata.from_lists(**lists, max_num_logprobs=max_num_logprobs)


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


@given(logits=logit_rows(), data=st.data())
def test_temperature_divides(logits: torch.Tensor, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(0.0078125, 2.0, width=32), min_size=len(logits), max_size=len(logits)))
    fast = apply_temperature(logits, torch.tensor(values))
    slow = torch.tensor([reference.temperature(row, value) for row, value in zip(logits.tolist(), values)])
    torch.testing.assert_close(fast, slow, atol=FLOAT32.atol, rtol=FLOAT32.rtol)


@given(logits=logit_rows(), data=st.data())
def test_top_k_equals_its_twin_and_keeps_exactly_k(logits: torch.Tensor, data: st.DataObject) -> None:
    vocab = logits.shape[1]
    values = data.draw(st.lists(st.integers(-1, vocab + 2), min_size=len(logits), max_size=len(logits)))
    fast = apply_top_k(logits, torch.tensor(values))
    slow = [reference.top_k(row, value) for row, value in zip(logits.tolist(), values)]
    assert torch.equal(fast, torch.tensor(slow))
    assert [len(row) for row in kept(fast)] == [min(value, vocab) if value > 0 else vocab for value in values]


@given(logits=logit_rows(), data=st.data())
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: torch.Tensor, data: st.DataObject) -> None:
    """The definition itself: a prefix of the descending order, with mass p at least, and less without its last token."""
    values = data.draw(st.lists(st.floats(1e-6, 0.999), min_size=len(logits), max_size=len(logits)))
    fast = apply_top_p(logits, torch.tensor(values, dtype=torch.float32))
    for row, before, after, p in zip(kept(fast), logits, fast, values):
        order = reference.descending(before.tolist())
        probs = reference.softmax(before.tolist())
        assert row and sorted(order[: len(row)]) == row
        assert torch.equal(after[row], before[row])
        assert math.fsum(probs[i] for i in row) >= p - ROUNDING
        assert math.fsum(probs[i] for i in order[: len(row) - 1]) < p + ROUNDING


def test_top_p_at_exact_boundaries_and_ties() -> None:
    """Four equal logits have mass 1/4 each without rounding, so `>=` and the order of ties can be seen."""
    fast = apply_top_p(torch.zeros(5, 4), torch.tensor([0.25, 0.5, 0.5001, 0.75, 1e-9]))
    assert kept(fast) == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0]]


def test_top_p_of_one_is_off_even_beside_a_row_where_it_is_on() -> None:
    """The mass of 99 999 tiny tokens rounds to 1 long before the last of them."""
    logits = torch.cat([torch.tensor([30.0]), torch.zeros(99_999)]).expand(2, -1)
    fast = apply_top_p(logits, torch.tensor([1.0, 0.5]))
    assert torch.equal(fast[0], logits[0])
    assert kept(fast)[1] == [0]


@given(logits=logit_rows(), data=st.data())
def test_min_p_equals_its_twin_away_from_the_threshold(logits: torch.Tensor, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(0.0, 1.0, width=32), min_size=len(logits), max_size=len(logits)))
    fast = apply_min_p(logits, torch.tensor(values))
    for before, after, value in zip(logits.tolist(), fast.tolist(), values):
        probs = reference.softmax(before)
        for x, y, p, slow in zip(before, after, probs, reference.min_p(before, value)):
            assert y == slow or (abs(p - value * max(probs)) < ROUNDING and y in (x, -math.inf))


def test_min_p_extremes() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -80.0]]).expand(2, -1)
    assert kept(apply_min_p(logits, torch.tensor([0.0, 1.0]))) == [[0, 1, 2, 3], [1, 2]]


@given(logits=logit_rows(), data=st.data())
def test_greedy_rows_are_the_exact_argmax_whatever_the_others_do(logits: torch.Tensor, data: st.DataObject) -> None:
    n = len(logits)
    temperature = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 0.7]), min_size=n, max_size=n))
    output = sample(logits, metadata_of(n, temperature=temperature, top_k=3, top_p=0.5, min_p=0.1))
    for row, token, t in zip(logits.tolist(), output.sampled_token_ids.tolist(), temperature):
        if t < 1e-5:
            assert token == row.index(max(row))
    assert output.logprobs is None and output.logprob_token_ids is None and output.ranks is None


@given(logits=logit_rows(), seed=st.integers(-(2**63), 2**63 - 1))
def test_top_k_of_one_and_a_tiny_top_p_are_argmax(logits: torch.Tensor, seed: int) -> None:
    n, argmax = len(logits), logits.argmax(dim=-1)
    for setting in ({"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(sample(logits, metadata_of(n, seeds=seed, **setting)).sampled_token_ids, argmax)


@given(data=st.data(), vocab=st.sampled_from([5, 64, 2000]))
def test_a_draw_depends_on_its_own_row_only(data: st.DataObject, vocab: int) -> None:
    """Any part of a batch, in any order, gives every row the token that it gets alone."""
    n = 8
    logits = 2.0 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))
    per_row: dict[str, list[Any]] = {
        "temperature": [0.0, 0.3, 0.8, 1.0, 1.0, 1.2, 1.5, 2.0],
        "top_k": [0, 3, -1, 50, 0, 0, 2, 4],
        "top_p": [0.9, 1.0, 0.9, 0.5, 1.0, 0.99, 1.0, 1.0],
        "min_p": [0.1, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.05],
        "seeds": data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n, max_size=n)),
        "positions": data.draw(st.lists(st.integers(0, 5000), min_size=n, max_size=n)),
    }

    def draw(rows: list[int]) -> list[int]:
        metadata = metadata_of(len(rows), **{key: [values[r] for r in rows] for key, values in per_row.items()})
        return sample(logits[rows], metadata).sampled_token_ids.tolist()

    alone = [draw([row])[0] for row in range(n)]
    some = data.draw(st.lists(st.sampled_from(range(n)), min_size=1, max_size=12))
    assert draw(some) == [alone[row] for row in some]


def test_settings_may_be_lists_or_columns_of_a_batch() -> None:
    """Whether a transform is on depends on the random rows alone, either way."""
    columns = {"temperature": [0.0, 1.0, 0.5], "top_k": [5, 0, -1], "top_p": [0.1, 1.0, 0.9], "min_p": [0.3, 0.0, 0.0]}
    rest: dict[str, Any] = {"seeds": [-1, 2**63 - 1, 3], "positions": [0, 1, 4000]}
    dtypes = (np.float32, np.int64, np.float32, np.float32)
    arrays = {name: np.array(column, dtype=dtype) for (name, column), dtype in zip(columns.items(), dtypes)}
    lists, made = SamplingMetadata.from_lists(**columns, **rest), SamplingMetadata.from_lists(**arrays, **rest)
    assert lists.random_rows == made.random_rows == [1, 2]
    assert lists.top_k is made.top_k is lists.min_p is made.min_p is None  # only a greedy row has them
    assert lists.top_p is not None and made.top_p is not None and torch.equal(lists.top_p, made.top_p)
    assert torch.equal(lists.temperature, made.temperature)
    assert all(torch.equal(a, b) for a, b in zip(lists.noise_keys, made.noise_keys))
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits, lists).sampled_token_ids, sample(logits, made).sampled_token_ids)


def test_a_greedy_batch_has_no_settings_but_takes_the_argmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    metadata = SamplingMetadata.greedy(4)
    assert metadata.random_rows == [] and metadata.temperature.tolist() == [0.0] * 4
    output = sample(logits, metadata)
    assert torch.equal(output.sampled_token_ids, logits.argmax(dim=-1)) and output.logprobs is None


def test_seed_and_position_both_change_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    tokens = {
        (seed, position): sample(logits, metadata_of(1, seeds=seed, positions=position)).sampled_token_ids.item()
        for seed in (-1, 0, 1, 2)
        for position in (0, 1, 2)
    }
    assert len(set(tokens.values())) == len(tokens)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 3), (-1, 5000), (2**63 + 12345, 1), (2**64 - 1, 2**32 - 1)])
def test_the_random_bits_are_philox(seed: int, position: int) -> None:
    """Salmon et al. 2011, in plain Python; a row that ends inside a group of four."""
    key = (seed % 2**32, (seed >> 32) % 2**32)
    slow = [word for group in range(6) for word in reference.philox((group, position, 0, 0), key)]
    signed = torch.tensor([5, seed - 2**64 if seed >= 2**63 else seed])
    assert random_words(22, signed, torch.tensor([9, position]))[1].tolist() == slow[:22]


def test_noise_is_positive_exponential_and_the_same_each_time() -> None:
    cpu = torch.device("cpu")
    noise = exponential_noise([1, 2, 1], [0, 0, 0], 100_000, cpu)
    assert noise.dtype == torch.float32 and bool((noise > 0).all())
    assert torch.equal(noise[0], noise[2]) and not torch.equal(noise[0], noise[1])
    for threshold in (0.01, 0.5, 1.0, 3.0):  # 5 standard deviations of a frequency over 100,000
        share = (noise[0] < threshold).double().mean().item()
        assert abs(share - (1 - math.exp(-threshold))) < 5 * math.sqrt(0.25 / 100_000)


CHI_SQUARE_9999 = {2: 18.4, 15: 44.3}  # by degrees of freedom: exceeded by chance once in 10,000


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs.double() * len(tokens)
    return float(((tokens.bincount(minlength=len(probs)) - expected) ** 2 / expected).sum())


@pytest.mark.slow(keep="seeds")
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_softmax(over: str) -> None:
    n = 20_000
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3))
    varied, fixed = list(range(n)), [12345] * n
    seeds, positions = (varied, fixed) if over == "seeds" else (fixed, varied)
    tokens = sample_random(logits.expand(n, -1), seeds, positions)
    assert chi_square(tokens, logits.softmax(dim=-1)) < CHI_SQUARE_9999[15]


def test_draws_follow_the_transformed_softmax() -> None:
    """Temperature 0.5 squares the probabilities. Then min-p drops the last two (0.0036 < 0.1 * 0.09), and top-p the fourth,
    because the first three now hold 0.895 of the mass. In any other order the fourth would stay."""
    n = 20_000
    probs = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.06, 0.04])
    metadata = metadata_of(n, temperature=0.5, min_p=0.1, top_k=5, top_p=0.88, seeds=list(range(n)))
    tokens = sample(probs.log().expand(n, -1), metadata).sampled_token_ids
    squares = probs[:3] ** 2
    assert tokens.max() == 2
    assert chi_square(tokens, squares / squares.sum()) < CHI_SQUARE_9999[2]


def test_top_k_comes_before_top_p() -> None:
    """Of the two tokens that top-k leaves, the first has two thirds of the mass; before it had half."""
    n = 500
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(n, -1)
    for top_p, expected in ((0.7, {0, 1}), (0.6, {0})):
        output = sample(logits, metadata_of(n, top_k=2, top_p=top_p, seeds=list(range(n))))
        assert set(output.sampled_token_ids.tolist()) == expected


@given(logits=logit_rows(), data=st.data())
def test_logprobs_equal_their_twin(logits: torch.Tensor, data: st.DataObject) -> None:
    vocab = logits.shape[1]
    count = data.draw(st.integers(0, vocab))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=len(logits), max_size=len(logits)))
    ids, values, ranks = gather_logprobs(logits, torch.tensor(tokens), count)
    assert ids.shape == values.shape == (len(logits), count + 1)
    for row, token, row_ids, row_values, rank in zip(
        logits.tolist(), tokens, ids.tolist(), values.tolist(), ranks.tolist()
    ):
        _, slow_values, slow_rank = reference.logprobs(row, token, count)
        assert row_values == pytest.approx(slow_values, abs=1e-4)
        every = reference.log_softmax(row)
        assert row_values == pytest.approx([every[i] for i in row_ids], abs=1e-4)  # each value belongs to its id
        assert row_ids[0] == token and len(set(row_ids[1:])) == count
        # Logits whose difference is lost in the rounding of the logarithm share a rank.
        assert rank == slow_rank or any(abs(x - row[token]) < 1e-4 for i, x in enumerate(row) if i != token)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
    metadata = metadata_of(2, temperature=[0.0, 0.1], top_k=1, max_num_logprobs=2)
    output = sample(logits, metadata)
    assert output.sampled_token_ids.tolist() == [0, 1]
    assert output.logprob_token_ids is not None and output.logprobs is not None and output.ranks is not None
    assert output.logprob_token_ids.tolist() == [[0, 0, 1], [1, 1, 2]]
    assert output.ranks.tolist() == [1, 1]
    expected = logits.log_softmax(dim=-1).gather(1, output.logprob_token_ids)
    torch.testing.assert_close(output.logprobs, expected)


def test_named_tokens_are_reported_instead_of_the_likeliest() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    wide, narrow = list(range(20, 30)), [5]
    metadata = replace(metadata_of(3, temperature=0.0, max_num_logprobs=2), named={0: wide, 2: narrow})
    output = sample(logits, metadata)
    assert output.logprob_token_ids is not None and output.logprobs is not None
    chosen, best = logits.argmax(-1).tolist(), logits[1].topk(2).indices.tolist()
    for row, tokens in enumerate((wide, best, narrow)):
        ids = [chosen[row], *tokens]
        assert output.logprob_token_ids[row, : len(ids)].tolist() == ids
        torch.testing.assert_close(output.logprobs[row, : len(ids)], logits[row].log_softmax(-1)[ids])


def test_logprobs_of_zero_hold_the_sampled_token_only() -> None:
    output = sample(torch.tensor([[0.0, 1.0, 1.0]]), metadata_of(1, temperature=0.0, max_num_logprobs=0))
    assert output.logprob_token_ids is not None and output.ranks is not None
    assert output.logprob_token_ids.tolist() == [[1]] and output.ranks.tolist() == [1]


def test_the_input_is_not_changed() -> None:
    logits = torch.randn(4, 50)
    before = logits.clone()
    sample(logits, metadata_of(4, temperature=0.7, top_k=5, top_p=0.8, min_p=0.1, max_num_logprobs=3))
    assert torch.equal(logits, before)


def test_a_transform_that_only_greedy_rows_ask_for_is_off() -> None:
    metadata = metadata_of(2, temperature=[0.0, 1.0], top_k=[5, 0], top_p=[0.5, 1.0], min_p=[0.2, 0.0])
    assert metadata.top_k is None and metadata.top_p is None and metadata.min_p is None
    assert metadata.random_rows == [1]


def test_temperatures_below_1e_5_are_greedy() -> None:
    assert metadata_of(4, temperature=[0.0, 9e-6, 1e-5, 1.0]).random_rows == [2, 3]


class Copies(TorchDispatchMode):
    """Notes every copy to another device: how many bytes, and whether the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.made.append((args[0].nbytes, kwargs.get("non_blocking", False)))
        return function(*args, **(kwargs or {}))


def test_settings_reach_a_device_in_one_copy_that_nobody_waits_for() -> None:
    with Copies() as copies:
        metadata = SamplingMetadata.from_lists(
            [1.0] * 3, [5] * 3, [0.9] * 3, [0.1] * 3, [2**64 - 1] * 3, [0] * 3, device="meta"
        )
    assert copies.made == [(3 * 32 + 3 * 16, True)]
    assert metadata.top_k is not None and metadata.top_k.shape == (3,) and metadata.top_k.dtype == torch.int64


def test_packed_arrays_arrive_whole_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second device at hand: pack for one, and stay."""
    arrays = [
        np.arange(5),
        np.array([[1.5, 2.5, 3.5]], dtype=np.float32),
        np.arange(6, dtype=np.int32)[::2],
        np.zeros(0),
    ]
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
    tensors = to_device(arrays, "meta")
    for array, tensor in zip(arrays, tensors):
        assert tensor.tolist() == array.tolist() and tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert tensor.storage_offset() * tensor.itemsize % 16 == 0


def test_penalties_bring_their_tokens_to_the_device_and_no_row_as_long_as_the_vocabulary() -> None:
    vocab, prompt, output = 50_000, np.array([5, 7, 5]), np.array([9, 9, 7])
    rules = RequestRules(SamplingParams(frequency_penalty=0.5), vocab)
    with Copies() as copies:
        there = make_rules([(rules, prompt, output)] * 2, "meta")
    assert there is not None and there.penalties is not None and there.penalties.output_counts.shape == (2, vocab)
    assert all(not_waiting for _, not_waiting in copies.made) and sum(size for size, _ in copies.made) < 1000
    here = make_rules([(None, prompt, output), (rules, prompt, output)])
    assert here is not None and here.penalties is not None and here.penalties.rows.tolist() == [1]
    assert here.penalties.in_prompt.nonzero()[:, 1].tolist() == [5, 7]
    assert {token: here.penalties.output_counts[0, token].item() for token in (5, 7, 9)} == {5: 0, 7: 1, 9: 2}
